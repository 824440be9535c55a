"""HiFT's groups: which differ, and a step of each that does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Direction, Event, streams_made_by
from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.hift import HiFT, HiFTConfig
from slivertune.hift.rotation import Group
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.kept_groups import measure_alike
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, PlannedMethod, given_arguments
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.plan import GroupPlan
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward, GradientMeter, StepPeak, group_plan, largest_of, measure_step


class SlowStreams(CopyStreams):
    """Copies of which nobody knows when they end: what leaves stays alive until HiFT lets the computation wait."""

    @override
    def record(self, direction: Direction | None = None) -> Event:
        return object()

    @override
    def compute_after(self, event: Event) -> None:
        pass


class HiFTRun:
    """HiFT over a model without data, one group's turn at a time.

    Args:
        model: The model.
        request: HiFT's settings and the base optimizer.
        is_shared: Whether the ranks share the state out: then it is computed from sizes, and must not come to the
            device beside the backward that is run.
    """

    def __init__(self, model: nn.Module, request: PlanRequest, *, is_shared: bool = False) -> None:
        self._model = model
        self._request = request
        optimizer_class, arguments = optimizer_of(request.optimizer)
        self._learning_rate = arguments["lr"]
        self._meter = GradientMeter(model)
        # Two updates a turn: the first makes a group's state, the second meets it where it waits. What is thrown away
        # after each turn is never met again.
        self._num_updates = 1 if request.state == "discard" or is_shared else 2
        self._config = HiFTConfig(
            layers_per_group=request.layers_per_group,
            steps_per_group=self._num_updates,
            # Files would be allocated for real; they hold what host memory holds.
            state="host" if request.state == "disk" else request.state,
            master=request.master_kind,
            stream_bytes=request.stream_bytes,
            gradients=request.gradients,
            update=request.update,
            prefetch_bytes=0 if request.state == "device" else request.prefetch_bytes,
        )
        with FakeOverrides():
            self.optimizer = HiFT(model, optimizer_class, config=self._config, **arguments)
        self._at_start = self.optimizer.state_dict()

    @streams_made_by(SlowStreams)
    def measure(self, group: Group, forward: Forward) -> StepPeak:
        """The larger peak of a group's first turn and of a later one; the state of all other groups is gone.

        Args:
            group: The group.
            forward: The model's forward.

        Returns:
            The peak; `after` is of the last update.
        """
        turn = {"updates": group.index * self._num_updates, "held_lr": [self._learning_rate]}
        self.optimizer.load_state_dict({**self._at_start, "hift": {**self._at_start["hift"], **turn}})
        peaks = []
        with Ledger(self._model) as ledger:
            for _ in range(self._num_updates):
                peaks.append(measure_step(ledger, forward, self.optimizer, num_backwards=self._request.num_backwards))
                if self.optimizer.skipped_turns:
                    raise RuntimeError(f"group {group.index} lost its turn: no gradient reached its parameters")
        return replace(largest_of(peaks), after=peaks[-1].after)

    def plan_of(self, peak: StepPeak, members: Sequence[Group]) -> GroupPlan:
        """The plan of groups alike, the first of which was measured last.

        Args:
            peak: Of the first.
            members: All of them.
        """
        group, named = members[0], dict(self._model.named_parameters())
        parameters = [named[name] for name in group.parameter_names]
        state: dict[str, dict[str, Any]] = self.optimizer.state_dict()["state"]
        num_bytes = {"master": 0, "state": 0}
        for name in group.parameter_names:
            for key, value in state.get(name, {}).items():
                if isinstance(value, torch.Tensor):
                    num_bytes["master" if key == "master" else "state"] += value.nbytes
        return group_plan(
            peak,
            name=", ".join(layer.name for layer in group.layers),
            num_parameters=sum(parameter.numel() for parameter in parameters),
            gradient_bytes=self._meter.bytes_of(parameters),
            state_bytes=num_bytes["state"],
            master_bytes=num_bytes["master"],
            indices=tuple(member.index for member in members),
        )


class PlannedHiFT(PlannedMethod):
    """HiFT: of groups alike, the one with the largest peak is run."""

    settings = frozenset(
        {"layers_per_group", "state", "master", "stream_bytes", "gradients", "update", "prefetch_bytes"}
    )
    bf16_precision = "mixed_hi"
    trains_in_groups = True
    averages_in_buckets = True

    def waits_on_host(self, request: PlanRequest) -> bool:
        """Whether state is on the GPU in its own step alone."""
        return request.state != "device"

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run two updates of each distinct group."""
        run = HiFTRun(model, request, is_shared=layout not in ("single", "ddp"))
        groups, waiting = [], 0
        with attached(request, model) as notes:
            for members in alike(run.optimizer.groups, model):
                peak = measure_alike(partial(run.measure, forward=forward), members, request)
                if layout == "fsdp2" and len(members) > 1:
                    # Under the lowest block lies the embedding, so that it alone is not worked on while a block is on
                    # its way.
                    both = (peak.before_step, run.measure(members[1], forward).before_step)
                    peak = replace(peak, before_step=max(both, key=lambda census: census.device))
                groups.append(run.plan_of(peak, members))
                waiting += peak.after.host * len(members)
        if request.state == "device":
            groups = _with_state_of_others(groups)
        on_disk = request.state == "disk"
        return MeasuredSteps(
            groups=groups, host_bytes=0 if on_disk else waiting, disk_bytes=waiting if on_disk else 0, notes=notes
        )

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """Groups, and where their state waits."""
        arguments = given_arguments(
            request, ("layers_per_group", "state", "stream_bytes", "gradients", "update", "prefetch_bytes")
        )
        if request.state == "disk":
            arguments += ["--state_dir", "state"]
        # fp32 weights have no masters, whatever this says; bf16 ones have, unless it says otherwise.
        if request.precision in ("bf16", "mixed_hi") and request.master_kind != "fp32":
            arguments += ["--master", request.master_kind]
        if request.gradients == "stepped":
            arguments += ["--max_grad_norm", "0"]
        return tuple(arguments)


def _with_state_of_others(groups: Sequence[GroupPlan]) -> list[GroupPlan]:
    """Add what stays on the device of the groups whose turn it is not."""
    total = sum((group.state_bytes + group.master_bytes) * len(group.indices) for group in groups)
    return [
        replace(
            group, peak=replace(group.peak, state=group.peak.state + total - group.state_bytes - group.master_bytes)
        )
        for group in groups
    ]


def alike(groups: Sequence[Group], model: nn.Module) -> list[list[Group]]:
    """Sort groups by what they hold: kinds of layers, and shapes and dtypes of the parameters that train.

    Of groups alike, the lowest has the largest peak: its backward goes through all blocks that those of the others go
    through, and more, and their updates are the same.

    Args:
        groups: All groups, from the bottom up.
        model: The model.

    Returns:
        The groups in lists of those alike, each from the bottom up.
    """
    named = dict(model.named_parameters())
    found: dict[Any, list[Group]] = {}
    for group in groups:
        kinds = tuple(layer.kind for layer in group.layers)
        sizes = tuple((tuple(named[name].shape), named[name].dtype) for name in group.parameter_names)
        found.setdefault((kinds, sizes), []).append(group)
    return list(found.values())
