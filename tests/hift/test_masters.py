"""Weights that others write after HiFT was built count, as they do for a plain AdamW on the weights themselves."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT
from slivertune.core.ledger import StateCount
from slivertune.core.torch_internals import tree_leaves
from slivertune.hift.chunk import refresh_master
from tests.helpers.models import (
    LAYERS,
    assert_all_moved,
    assert_same_bits,
    assert_same_tree,
    differing,
    small_decoder,
    token_batches,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.reference import NaiveHiFT, train
from tests.hift.cases import OPTIMIZERS, hift_over, with_reference

PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "pieces": {"stream_bytes": 4096},
    "device": {"state": "device"},
    "disk": {"state": "disk"},
    "in backward": {"gradients": "stepped"},
}


def settings(place: str, tmp_path: Path) -> dict[str, Any]:
    return {"lr": 1e-2, **PLACES[place], **({"state_dir": str(tmp_path)} if place == "disk" else {})}


def build(place: str, tmp_path: Path, model: nn.Module, **options: Any) -> HiFT:
    return hift_over(model, torch.optim.AdamW, **settings(place, tmp_path), **options)[1]


def cycle(model: nn.Module, optimizer: Any, start: int = 0) -> None:
    train(model, optimizer, token_batches(start + LAYERS), LAYERS, start=start)


WRITERS: dict[str, Callable[[nn.Parameter, torch.Tensor], object]] = {
    "copy_": lambda parameter, value: parameter.copy_(value),
    "arithmetic": lambda parameter, value: parameter.zero_().add_(value),
    "data": lambda parameter, value: setattr(parameter, "data", value.clone()),
    # As averaging libraries put their weights in; neither a tensor's version nor its storage tells.
    "into data": lambda parameter, value: parameter.data.copy_(value),
}


@torch.no_grad()
def write(model: nn.Module, values: dict[str, torch.Tensor], writer: str = "load_state_dict") -> None:
    if writer == "load_state_dict":
        model.load_state_dict(values)
    else:
        for name, parameter in model.named_parameters():
            WRITERS[writer](parameter, values[name])


@rotated(place=PLACES, writer=["load_state_dict", *WRITERS])
def test_a_cycle_at_rate_zero_does_not_bring_the_old_weights_back(place: str, writer: str, tmp_path: Path) -> None:
    model, new = small_decoder(torch.bfloat16), weights(small_decoder(torch.bfloat16, seed=7))
    new["model.norm.weight"] = torch.zeros_like(new["model.norm.weight"])
    hift = build(place, tmp_path, model, weight_decay=0.0)
    cycle(model, hift)
    write(model, new, writer)
    hift.param_groups[0]["lr"] = 0.0
    cycle(model, hift, LAYERS)
    assert hift.updates == 2 * LAYERS
    assert differing(weights(model), new) == []


class StaleMasters(NaiveHiFT):
    """The reference, whose masters follow weights that others have written, element by element."""

    def step(self) -> None:
        for name in self.active:
            if name in self.masters:
                master, weight = self.masters[name].data, self.parameters[name].data
                master.copy_(torch.where(master.to(weight.dtype) != weight, weight.float(), master))
        super().step()


def scale_in_part(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.view(-1)[::3].mul_(0.9)


def scale_data_in_part(parameter: torch.Tensor) -> None:
    parameter.data.view(-1)[::3].mul_(0.9)


@rotated(place=PLACES, change=[scale_in_part, scale_data_in_part])
def test_training_goes_on_from_weights_that_were_changed_in_part(
    place: str, change: Callable[[torch.Tensor], None], tmp_path: Path
) -> None:
    model, hift, other, reference = with_reference(
        small_decoder(torch.bfloat16), torch.optim.AdamW, kind=StaleMasters, **settings(place, tmp_path)
    )
    before = weights(model)
    for start in range(0, 3 * LAYERS, LAYERS):
        for trained, optimizer in ((model, hift), (other, reference)):
            cycle(trained, optimizer, start)
            for parameter in trained.parameters():
                change(parameter)
        assert_same_bits(model, other)
    assert_all_moved(model, before)


@rotated(place=PLACES, order=["optimizer first", "model first"])
def test_loading_the_same_weights_changes_nothing(place: str, order: str, tmp_path: Path) -> None:
    """An average that is swapped in for an evaluation and out again, and both orders of loading a checkpoint."""
    model, undisturbed = small_decoder(torch.bfloat16), small_decoder(torch.bfloat16)
    hift, plain = build(place, tmp_path, model), build(place, tmp_path, undisturbed)
    for trained, optimizer in ((model, hift), (undisturbed, plain)):
        cycle(trained, optimizer)
    own = weights(model)
    write(model, weights(small_decoder(torch.bfloat16, seed=3)))
    write(model, own)
    cycle(model, hift, LAYERS)
    cycle(undisturbed, plain, LAYERS)
    assert_same_bits(model, undisturbed)

    saved_model, saved_state = weights(model), copy.deepcopy(hift.state_dict())
    again = small_decoder(torch.bfloat16, seed=9)
    resumed = build(place, tmp_path, again)
    if order == "model first":
        again.load_state_dict(saved_model)
    resumed.load_state_dict(saved_state)
    if order == "optimizer first":
        again.load_state_dict(saved_model)
    assert_same_tree(resumed.state_dict(), saved_state)
    cycle(again, resumed, 2 * LAYERS)
    cycle(undisturbed, plain, 2 * LAYERS)
    assert_same_bits(again, undisturbed)


@rotated(place=PLACES, writer=["load_state_dict", "into data"])
def test_a_state_that_is_saved_after_weights_were_loaded_brings_the_new_ones(
    place: str, writer: str, tmp_path: Path
) -> None:
    model, new = small_decoder(torch.bfloat16), weights(small_decoder(torch.bfloat16, seed=7))
    hift = build(place, tmp_path, model)
    cycle(model, hift)
    write(model, new, writer)
    saved = copy.deepcopy(hift.state_dict())
    again = small_decoder(torch.bfloat16, seed=9)
    resumed = build(place, tmp_path, again)
    resumed.load_state_dict(saved)
    assert differing(weights(again), new) == []
    new_again = weights(small_decoder(torch.bfloat16, seed=8))
    write(again, new_again, writer)
    final = small_decoder(torch.bfloat16, seed=9)
    build(place, tmp_path, final).load_state_dict(copy.deepcopy(resumed.state_dict()))
    assert differing(weights(final), new_again) == []


def test_the_optimizers_state_stays_as_a_plain_optimizer_keeps_it() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, layers_per_group=LAYERS, lr=1e-2)
    bare = small_decoder()
    plain = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    for trained, optimizer in ((model, hift), (bare, plain)):
        train(trained, optimizer, token_batches(3), 3)
        write(trained, weights(small_decoder(seed=5)))
        train(trained, optimizer, token_batches(3), 3)
    assert_same_bits(model, bare)


def test_a_master_keeps_the_elements_that_nobody_wrote_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(500, generator=generator)
    weight = master.to(torch.bfloat16)
    weight[::5] = torch.randn(100, generator=generator).to(torch.bfloat16)
    weight[0], weight[5], weight[10] = 0.0, -0.0, float("inf")
    expected = [
        float(w) if float(torch.tensor(m).to(torch.bfloat16)) != float(w) else m
        for m, w in zip(master.tolist(), weight.tolist(), strict=True)
    ]
    assert refresh_master(master, weight).tolist() == expected


@pytest.mark.parametrize("waiting", [None, "int8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_masters_and_state_take_no_more_host_memory_than_their_bytes(optimizer: str, waiting: Any) -> None:
    """Also of classes whose state is not measured before it is made."""
    own = StateCount()
    model, hift = hift_over(small_decoder(torch.bfloat16, vocab=1000), optimizer, layers_per_group=2, waiting=waiting)
    train(model, hift, token_batches(LAYERS), LAYERS)
    tensors = [
        value
        for state in hift.state_dict()["state"].values()
        for value in tree_leaves(state)
        if isinstance(value, torch.Tensor)
    ]
    gaps = 1024 * len(tensors)
    assert own.num_bytes()["host"] <= sum(each.nbytes for each in tensors) + gaps
