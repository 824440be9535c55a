"""`slivertune train --layers_per_group auto`: the number is chosen once, said, and kept by the checkpoints."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slivertune.planning.cards import card_named
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.methods import hift
from tests.training.tiny_runs import TINY_CYCLE, UNMEASURED, Runs, assert_same_bits

AUTO = ("--layers_per_group", "auto", "--gpu", "4090")
SLOW = replace(card_named("4090"), peak_flops=1e6)
"""On such a card all copies hide."""


def test_the_number_that_is_chosen_is_trained_and_a_resumed_run_keeps_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    choose = hift.choose_layers_per_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return choose(*args, **kwargs)

    monkeypatch.setattr(hift, "find_card", lambda name: {"4090": SLOW}[name])
    monkeypatch.setattr(hift, "choose_layers_per_group", noted)
    more = ("--max_length", "32", "--save_steps", "3", "--weight_decay", "0.1", *UNMEASURED)
    results = runs.train("auto", *more, *AUTO)
    said = " ".join(runs.printed().split())
    assert results["settings"]["layers_per_group"] == TINY_CYCLE and results["settings"]["num_groups"] == 1
    assert "choosing layers_per_group for a GeForce RTX 4090" in said
    assert f"chose {TINY_CYCLE} layers_per_group" in said and "all layers" in said
    ((request, config, card, limits), settings) = asked.pop()
    assert (request.batch_size, request.seq_length, request.layers_per_group) == (2, 32, 1)
    assert config.num_hidden_layers == TINY_CYCLE - 2 and card is SLOW
    assert limits.device_bytes == SLOW.memory_bytes and 2**20 < limits.host_bytes < 2**50
    assert settings["prefetch_bytes"] is None

    runs.train("given", *more, "--layers_per_group", str(TINY_CYCLE))
    assert_same_bits(runs["auto"], runs["given"])
    resumed = ("--resume_from_checkpoint", str(runs["auto"] / "checkpoint-3"))
    runs.train("resumed", *more, *AUTO, *resumed)
    assert asked == []
    assert_same_bits(runs["resumed"], runs["given"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            AUTO[:2],
            "--layers_per_group auto: there is no CUDA device here whose rates could be used. Name one by --gpu",
        ),
        ((*AUTO[:3], "none"), "--layers_per_group auto: gpu='none' must be one of '3060-12GB', '3090'"),
        (("--gpu", "4090"), "--gpu 4090 takes effect only with --layers_per_group auto"),
        (("--layers_per_group", "-1"), "layers_per_group=-1 must be a number of layers"),
    ],
)
def test_what_can_not_be_chosen_is_said_before_anything_is_loaded(
    words: tuple[str, ...], part: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = runs.complaint(*words)
    assert part in error and error.count("\n") == 1
    assert not runs["out"].exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--state", "discard"), "state='discard' others or none decide. Give a number, or use state='host'"),
        (("--optim", "rmsprop"), "a plan does not know --optim rmsprop"),
    ],
)
def test_a_run_that_can_not_be_planned_is_not_chosen_for(words: tuple[str, ...], part: str, runs: Runs) -> None:
    error = runs.complaint(*AUTO, *words)
    assert "slivertune train: error: --layers_per_group auto: " in error and part in error


def test_several_processes_and_what_others_leave_of_the_card_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    method = parse_train_arguments(["--output_dir", "nowhere", *AUTO]).method
    with pytest.raises(ValueError, match=r"chooses for one GPU, and this run has 2 processes\. Give a number"):
        method.check(frozenset(), SimpleNamespace(world_size=2, optim="adamw_torch", optim_target_modules=None))  # type: ignore[arg-type]
    assert hift._usable_bytes(SLOW, "4090") == 24 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    assert hift._usable_bytes(SLOW, None) == 800
