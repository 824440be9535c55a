"""`slivertune train --keep_activations`: fewer blocks are computed again, and no bit is another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from slivertune.core import activation_room
from slivertune.core.activation_room import DeviceMemory
from slivertune.core.kept_activations import KeptActivationsHandle
from slivertune.training.command_line import parse
from slivertune.training.options.arguments import RunArguments
from slivertune.training.output.plan_line import request_of
from tests.training.tiny_runs import CHECKPOINTED, CHECKPOINTED_METHODS, TINY_CYCLE, UNMEASURED, Runs, assert_same_bits


@CHECKPOINTED_METHODS
def test_a_run_that_keeps_activations_has_the_bits_of_plain_checkpointing_and_computes_less_again(
    method: tuple[str, ...], runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, forward = [], LlamaMLP.forward

    def counted(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and torch._C._current_graph_task_id() != -1:
            counts[-1] += 1
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    results = []
    for number in ("none", "0", "1", "2"):
        counts.append(0)
        more = () if number == "none" else ("--keep_activations", number)
        results.append(runs.train(number, *method, *CHECKPOINTED, "--max_steps", str(TINY_CYCLE), *UNMEASURED, *more))
        out = runs.printed()
        line = f"  keeps   activations of {number} of 2 checkpointed blocks, from the top"
        assert (line in out) == bool(more)
        assert results[-1]["settings"]["keep_activations"] == (int(number) if more else None)
        assert_same_bits(runs["none"], runs[number])
    assert counts[0] == counts[1] > counts[2] > counts[3] == 0


def test_the_plan_of_a_run_knows_how_many_blocks_keep_and_a_run_that_is_over_lets_go(runs: Runs) -> None:
    run = runs.assembled("out", *CHECKPOINTED, "--keep_activations", "2")
    model = run.trainer.model
    assert model is not None and request_of(run).keep_activations == 2
    with pytest.raises(RuntimeError, match="keeps activations of some blocks already"):
        KeptActivationsHandle(model, 1)
    run.close()
    KeptActivationsHandle(model, 1).remove()


@pytest.mark.slow
def test_a_run_with_auto_measures_a_cycle_twice_and_then_keeps_with_the_same_bits(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (*CHECKPOINTED, "--max_steps", str(4 * TINY_CYCLE), "--per_device_train_batch_size", "4")
    runs.train("plain", *more)
    # A device whose memory never ends, in which nothing is ever allocated.
    endless = DeviceMemory(allocated=0, highest=0, limit=10**12)
    monkeypatch.setattr(activation_room, "read_memory", lambda *_, **__: endless)
    for module in (activation_room, parse):
        monkeypatch.setattr(module, "check_can_measure", lambda *_: None)
    seen, enter = [], activation_room.ActivationRoom.enter_block

    def watched(room: activation_room.ActivationRoom, *arguments: Any) -> None:
        enter(room, *arguments)
        seen.append(room.num_kept)

    monkeypatch.setattr(activation_room.ActivationRoom, "enter_block", watched)
    results = runs.train("auto", *more, "--keep_activations", "auto")
    assert_same_bits(runs["plain"], runs["auto"])
    assert results["settings"]["keep_activations"] == "auto" and results["planned_peak_bytes"] is None
    assert set(seen[: 2 * 2 * TINY_CYCLE]) == {0} and 2 in seen[2 * 2 * TINY_CYCLE :]
    out = runs.printed()
    assert "  keeps   activations of as many as fit of 2 checkpointed blocks, from the top" in out
    assert "  memory  not planned: --keep_activations auto fills the memory that the device has left" in out


def test_a_run_with_auto_is_not_planned(runs: Runs) -> None:
    run = runs.assembled("out", *CHECKPOINTED)
    other = replace(run, arguments=replace(run.arguments, run=RunArguments(keep_activations="auto")))
    with pytest.raises(ValueError, match="--keep_activations auto fills the memory that the device has left"):
        request_of(other)
    run.close()


def test_more_blocks_than_the_model_has_are_refused_before_it_is_trained(runs: Runs) -> None:
    error = runs.complaint(*CHECKPOINTED, "--keep_activations", "3")
    assert "keep_activations=3 must be at most 2, the number of blocks of" in error
