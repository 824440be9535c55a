"""Ctrl-C at any call of a step: the run goes on to the same bits, or refuses to until a checkpoint is loaded."""

import copy
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

import slivertune
from tests.helpers.models import Batch, assert_same_bits, differing, small_decoder, token_batches, weights
from tests.helpers.ranks import quick
from tests.helpers.reference import train
from tests.hift.cases import hift_over
from tests.sft.runs import over

PACKAGE = str(Path(slivertune.__file__).parent)
TOTAL = 6
INTERRUPTED = 3
"""Index of the update that is interrupted."""
LAST = 3
"""Calls at the end of the step that are interrupted, too, less one."""

ADAFACTOR = {"scale_parameter": False, "relative_step": False}
RUNS: dict[str, dict[str, Any]] = {
    "HiFT": {"stream_bytes": 4096, "max_grad_norm": 0.1},
    "HiFT, several updates per turn": {"stream_bytes": 4096, "steps_per_group": 2, "prefetch_bytes": 16384},
    "HiFT, on the device": {"state": "device", "layers_per_group": 5},
    "HiFT, on disk": {"state": "disk", "state_dir": "state"},
    "HiFT, discarded": {"state": "discard"},
    "HiFT, gradients on the host": {"gradients": "host", "max_grad_norm": 0.1, "layers_per_group": 2},
    "HiFT, stepped": {"gradients": "stepped", "layers_per_group": 2},
    "HiFT, layers above": {"gradients": "stepped", "layers_per_group": 2, "inactive": "above", "master": "stochastic"},
    "HiFT, nf4": {"waiting": "nf4", "layers_per_group": 2},
    "HiFT, weights on the host": {"weights": "host", "layers_per_group": 2},
    "HiFT, in tiles": {"master": "stochastic", "state": "device", "layers_per_group": 5},
    "SFT (AG)": {"estimation_steps": 1, "reselection_interval": 2},
    "SFT (AG), packed": {"estimation_steps": 1, "reselection_interval": 2, "packed": True},
    "SFT (MA)": {"selection": "momentum", "reselection_interval": 2},
}


def built(name: str, folder: Path) -> tuple[Any, Any]:
    """A model and its optimizer."""
    settings = dict(RUNS[name])
    model = small_decoder(torch.bfloat16)
    if name.startswith("SFT"):
        return over(model, total_steps=TOTAL + 1, **settings)
    if "state_dir" in settings:
        settings["state_dir"] = str(folder)
    if name == "HiFT, in tiles":
        return hift_over(model, Adafactor, lr=1e-2, **ADAFACTOR, **settings)
    return hift_over(model, torch.optim.AdamW, lr=1e-2, **settings)


class Calls:
    """Calls of the package's functions: counts them, and raises KeyboardInterrupt at one.

    Expressions that generate are left out: Python ignores what is raised while they are closed.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        self.number = 0
        self._stop_at = stop_at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<genexpr>":
            self.number += 1
            if self.number == self._stop_at:
                sys.setprofile(None)
                raise KeyboardInterrupt


@contextmanager
def watched(calls: Calls) -> Iterator[None]:
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(None)


def stepped(model: Any, optimizer: Any, batch: Batch, name: str, calls: Calls) -> None:
    """An update whose step, with stepped gradients its backward, too, is watched."""
    loss = model(**batch).loss
    if RUNS[name].get("gradients") == "stepped":
        with watched(calls):
            loss.backward()
            optimizer.step()
        return
    loss.backward()
    with watched(calls):
        optimizer.step()


def steps_again(optimizer: Any) -> bool:
    """Step again. Return whether that was accepted."""
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    else:
        return True
    assert "Load the last checkpoint" in message
    with pytest.raises(RuntimeError, match=r"Load the last checkpoint|is open"):
        optimizer.state_dict()
    return False


@pytest.mark.parametrize(("name", "num_places"), quick(itertools.product(RUNS, [6, 60]), [(name, 6) for name in RUNS]))
def test_an_interrupted_step_is_refused_or_goes_on_to_the_same_bits(name: str, num_places: int, tmp_path: Path) -> None:
    batches = token_batches(TOTAL)
    whole, uninterrupted = built(name, tmp_path / "whole")
    calls = Calls()
    train(whole, uninterrupted, batches, INTERRUPTED)
    stepped(whole, uninterrupted, batches[INTERRUPTED], name, calls)
    uninterrupted.zero_grad()
    train(whole, uninterrupted, batches, TOTAL - INTERRUPTED - 1, start=INTERRUPTED + 1)
    refused = 0
    drawn = random.Random(name).sample(range(1, calls.number + 1), num_places)
    for place in [*drawn, *range(calls.number - LAST, calls.number + 1)]:
        model, optimizer = built(name, tmp_path / str(place))
        train(model, optimizer, batches, INTERRUPTED)
        kept, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        calls = Calls(place)
        try:
            stepped(model, optimizer, batches[INTERRUPTED], name, calls)
        except KeyboardInterrupt:
            goes_on = steps_again(optimizer)
        else:
            assert calls.number < place, "the interruption was swallowed"
            goes_on = True
        if not goes_on:
            refused += 1
            model.load_state_dict(kept)
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        train(model, optimizer, batches, TOTAL - optimizer.updates, start=optimizer.updates)
        assert optimizer.updates == TOTAL, place
        assert_same_bits(model, whole)
    assert refused, "no interruption was refused"


@pytest.mark.parametrize("merge", [True, False])
def test_detaching_after_an_interrupted_step_leaves_the_weights(merge: bool, tmp_path: Path) -> None:
    model, optimizer = built("SFT (AG)", tmp_path)
    model(**token_batches(1)[0]).loss.backward()
    with watched(Calls(2000)), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    left = weights(model)
    with pytest.warns(UserWarning, match=r"detach\(\) leaves the weights as they are: step\(\) did not end"):
        optimizer.detach(merge=merge)
    remaining = weights(model)
    assert differing(remaining, {name: left[name] for name in remaining}) == []
    assert all(each.requires_grad for each in model.parameters())
