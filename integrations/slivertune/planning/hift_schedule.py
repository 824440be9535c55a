"""The schedule of HiFT's steps, recorded from a run without data."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from slivertune.core.copy_streams import streams_made_by
from slivertune.hift import HiFT, HiFTConfig
from slivertune.planning.cards import Rates
from slivertune.planning.fake import FakeOverrides, without_data
from slivertune.planning.make import attached, build_model, give_sizes, make_batch
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Entry
from slivertune.planning.schedule_player import StepTime, play
from slivertune.planning.schedule_recorder import ScheduleRecorder
from slivertune.planning.step import autocast_of

_NUM_BEFORE = 2
"""Steps that are played before the cycle that counts: write-backs of one run under the next, so that the first has its
neighbour's, and that one had what it loads ahead under a whole step. Where gradients do not stay on the device, it is a
whole cycle: pieces follow the order in which the last backward's gradients came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTSchedule:
    """A cycle of HiFT's steps, and a few before it."""

    entries: Sequence[Entry]
    """The schedule."""
    groups: tuple[str, ...]
    """The layers of each group, bottom of the model first."""

    def cycle(self, rates: Rates) -> list[StepTime]:
        """The steps of the cycle, as long as they take on a card, by group.

        Args:
            rates: The card's.
        """
        return sorted(play(self.entries, rates)[-len(self.groups) :], key=lambda step: step.group)


def record_hift(request: PlanRequest, config: PreTrainedConfig, *, max_grad_norm: float | None = None) -> HiFTSchedule:
    """Record a cycle in which every group has met its batch before, so that all state waits on the host.

    Costs two or three times the steps of a plan, and seconds for each further group.

    Args:
        request: The run: HiFT on one GPU. All its micro-batches are run.
        config: The model's configuration.
        max_grad_norm: As in `HiFTConfig`.

    Raises:
        ValueError: If the run is not HiFT's on one GPU, or the model can't be run without data.
    """
    if request.method != "hift" or request.layout != "single":
        raise ValueError(
            f"method={request.method!r} with layout={request.layout!r} has no schedule of copies that could be "
            "recorded; take method='hift' and layout='single'"
        )
    model = build_model(request, config)
    recorder = ScheduleRecorder()
    with without_data(), streams_made_by(recorder.streams):
        give_sizes(model)
        batch = make_batch(request)
        optimizer_class, arguments = optimizer_of(request.optimizer)
        settings = HiFTConfig(
            layers_per_group=request.layers_per_group,
            state=request.state,
            master=request.master_kind,
            stream_bytes=request.stream_bytes,
            prefetch_bytes=request.prefetch_bytes,
            gradients=request.gradients,
            update=request.update,
            max_grad_norm=max_grad_norm,
        )
        with FakeOverrides():
            optimizer = HiFT(model, optimizer_class, config=settings, **arguments)
        num_groups = optimizer.num_groups
        with attached(request, model):
            for _ in range(num_groups):
                _step_without_computing(model, batch, optimizer)
            num_before = _NUM_BEFORE if request.gradients == "device" else num_groups
            for _ in range(num_before + num_groups):
                _step(model, batch, optimizer, recorder, request)
    if optimizer.skipped_turns:
        raise RuntimeError(f"groups {sorted(optimizer.skipped_turns)} lost a turn: no gradient reached them")
    return HiFTSchedule(
        entries=recorder.entries,
        groups=tuple(", ".join(layer.name for layer in group.layers) for group in optimizer.groups),
    )


def _step(
    model: Any, batch: dict[str, torch.Tensor], optimizer: HiFT, recorder: ScheduleRecorder, request: PlanRequest
) -> None:
    group = optimizer.active_group
    num_backwards = request.gradient_accumulation_steps
    for index in range(num_backwards):
        with recorder.recording("forward", group), autocast_of(request.has_autocast):
            loss = model(**batch).loss
        accumulating = optimizer.accumulating() if index < num_backwards - 1 else nullcontext()
        with FakeOverrides(), recorder.recording("backward", group), accumulating:
            loss.backward()
        del loss
    with FakeOverrides(), recorder.recording("step", group):
        optimizer.step()
        optimizer.zero_grad()


class _EnoughSeenError(Exception):
    """Ends a forward after HiFT has seen its inputs."""


def _step_without_computing(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: HiFT) -> None:
    """A turn that leaves what any turn leaves, but for the forward and the backward of the model, which take long."""

    def stop(*ignored: Any) -> None:
        raise _EnoughSeenError

    handle = model.register_forward_pre_hook(stop)
    try:
        model(**batch)
    except _EnoughSeenError:
        pass
    finally:
        handle.remove()
    parameters = [weight.parameter for weight in optimizer.weights_of(optimizer.active_group)]
    with FakeOverrides():
        torch.autograd.backward(parameters, [torch.empty_like(parameter) for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
