"""Plans of HiFT: find the groups that differ, and measure the steps of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.byte_text import format_bytes
from slivertune.core.layers import find_blocks
from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.core.torch_internals import storage_key
from slivertune.hift.disk import split_bytes
from slivertune.hift.rotation import Group
from slivertune.planning.alike_groups import alike, measure_alike
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.four_bit import num_weights
from slivertune.planning.hift_optimizer import hift_over, meet_gradients
from slivertune.planning.layouts import averaged_in_buckets
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, Measurer, PlannedMethod, given_arguments
from slivertune.planning.plan import GroupPlan, Phase
from slivertune.planning.request import PlanRequest
from slivertune.planning.slow_streams import planned_streams
from slivertune.planning.step import (
    Forward,
    GradientMeter,
    StepPeak,
    UpdatePeak,
    group_plan,
    larger_of_two,
    largest_of,
    measure_step,
    measure_update,
)
from slivertune.planning.step_work import Place, UpdateWork

_NAMED_ALIKE = (
    "layers_per_group",
    "layers",
    "steps_per_group",
    "state",
    "state_ram_bytes",
    "device_bytes",
    "stream_bytes",
    "gradients",
    "inactive",
    "compile_step",
    "waiting",
    "prefetch_bytes",
    "weights",
    "resident_bytes",
)
"""Settings of HiFT that a plan reads and that training has by the same names and values. `master` differs."""


_FP32 = 4


@dataclass(frozen=True, slots=True)
class _KnownTurn:
    """Measurements of a group's turn that hold for other batches."""

    first: UpdatePeak
    second: UpdatePeak
    state: dict[str, Any]
    """State of the optimizer between the two updates."""


class HiFTRun:
    """HiFT over a model of fake tensors, one group's turn at a time.

    Args:
        model: Model of fake tensors.
        request: Run, with HiFT's settings and the base optimizer.
        is_shared: Whether the ranks shard the optimizer state. The state is then computed from sizes, and must not be
            on the device during the backward that is run.
    """

    def __init__(self, model: nn.Module, request: PlanRequest, *, is_shared: bool = False) -> None:
        self._model = model
        self._request = request
        self._meter = GradientMeter(model)
        # Two updates per turn: the first creates a group's state, the second finds it offloaded. State that is
        # discarded after every update is never found again.
        throws_away = request.state == "discard" and request.steps_per_group == 1
        self._num_updates = 1 if throws_away or is_shared else 2
        with planned_streams(self._request):
            self.optimizer = hift_over(model, request, updates_a_turn=self._num_updates)
            with FakeOverrides():
                self.optimizer.turns.state_sizes()  # trial steps on parameters of its own, in no update
        self._learning_rate = self.optimizer.param_groups[0]["lr"]
        self._at_start = self.optimizer.state_dict()
        self._known: dict[int, _KnownTurn] = {}

    def measure(self, group: Group, forward: Forward) -> StepPeak:
        """Measure the larger peak of a group's first update and of a later one, without the state of other groups.

        A second call for the same group runs only the forward and the backward, if `_can_be_taken_up`.

        Args:
            group: Group to measure.
            forward: Forward of the model on its batch.

        Returns:
            Larger peak; `after` is of the last update, or of the first one if the state is discarded after a turn.
        """
        with planned_streams(self._request):
            if group.index in self._known:
                return self._measure_again(group, forward, self._known[group.index])
            peak = self._measure_second(group, forward) if self._num_updates > 1 else None
            return peak or self._measure_all(group, forward)

    def _measure_all(self, group: Group, forward: Forward) -> StepPeak:
        self._begin_turn(group, self._at_start)
        peaks = []
        with Ledger(self._model) as ledger:
            for _ in range(self._num_updates):
                peaks.append(self._measure_step(ledger, forward))
                # Text reaches no image tower, so that the turns of the tower's groups pass without an update.
                if self.optimizer.skipped_turns and (self._request.task != "image_text" or self._request.images):
                    raise RuntimeError(f"group {group.index} lost its turn: no gradient reached its parameters")
        # State that is discarded at the end of a turn is offloaded between the updates of the turn.
        last = 0 if self._request.state == "discard" else -1
        return replace(largest_of(peaks), after=peaks[last].after, work=peaks[-1].work)

    def _measure_step(self, ledger: Ledger, forward: Forward, known: UpdatePeak | None = None) -> StepPeak:
        return measure_step(
            ledger,
            forward,
            self.optimizer,
            num_backwards=self._request.num_backwards,
            known=known,
            blocks_of=self._model,
        )

    def _measure_second(self, group: Group, forward: Forward) -> StepPeak | None:
        """Measure as `_measure_all` does, but run only the step of the first update, with arbitrary gradients.

        The first forward and backward have the tensors of the second ones, and no state yet. None means that the
        backward does not reach all parameters of the group.
        """
        parameters = self._parameters_of(group)
        self._begin_turn(group, self._at_start)
        with Ledger(self._model) as ledger:
            ledger.reset_peak()
            meet_gradients(self.optimizer, self._model, forward)
            backward = ledger.peak
            phase: Phase = "step"
            first = measure_update(ledger, self.optimizer)
            if backward.device > first.census.device:  # if the backward steps
                first, phase = replace(first, census=backward), "backward"
            self._meter.forget(parameters)
            second = self._measure_step(ledger, forward)
        if not self._meter.has_seen(parameters):
            return None
        if self._can_be_taken_up:
            self._known[group.index] = _KnownTurn(first, second.update, self.optimizer.state_dict())
        return self._larger(first, second, phase)

    def _measure_again(self, group: Group, forward: Forward, known: "_KnownTurn") -> StepPeak:
        with Ledger(self._model) as ledger:
            self._begin_turn(group, known.state, num_updates=1)
            second = self._measure_step(ledger, forward, known.second)
        return self._larger(known.first, second)

    @property
    def _can_be_taken_up(self) -> bool:
        """Whether a turn's state is offloaded between its updates, and no update is made in a backward."""
        request = self._request
        return request.state in ("host", "disk") and request.gradients != "stepped"

    def _larger(self, first: UpdatePeak, second: StepPeak, phase: Phase = "step") -> StepPeak:
        after = first.after if self._request.state == "discard" else second.after
        return replace(larger_of_two(first, second, phase), after=after)

    def _begin_turn(self, group: Group, state: dict[str, Any], num_updates: int = 0) -> None:
        """Start a group's turn, after `num_updates` of its updates."""
        turn = {"updates": group.index * self._num_updates + num_updates, "held_lr": [self._learning_rate]}
        self.optimizer.load_state_dict({**state, "hift": {**state["hift"], **turn}})
        with FakeOverrides():
            self.optimizer.turns.parked.make_codes()

    def _parameters_of(self, group: Group) -> list[nn.Parameter]:
        named = dict(self._model.named_parameters())
        return [named[name] for name in group.parameter_names]

    def offloaded_bytes(self, peak: StepPeak, group: Group) -> int:
        """Return the host bytes of a group's offloaded state between its turns.

        Args:
            peak: Peak of the group.
            group: Group that was measured last.
        """
        if self._request.waiting is None:
            return peak.after.host - self.optimizer.turns.parked.host_bytes
        # Masters of other groups are on the host from the beginning, and masters of the next group are in flight.
        state: dict[str, dict[str, Any]] = self.optimizer.state_dict()["state"]
        tensors = [
            value
            for name in group.parameter_names
            for value in state.get(name, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        storages = {storage_key(each.untyped_storage()): each.untyped_storage().nbytes() for each in tensors}
        return sum(storages.values())

    def plan_of(self, peak: StepPeak, members: Sequence[Group]) -> GroupPlan:
        """Return the plan of equal groups, of which the first was measured last.

        Args:
            peak: Peak of the first group.
            members: All equal groups.
        """
        group = members[0]
        parameters = self._parameters_of(group)
        state: dict[str, dict[str, Any]] = self.optimizer.state_dict()["state"]
        num_bytes = {"master": 0, "state": 0}
        for name in group.parameter_names:
            for key, value in state.get(name, {}).items():
                if isinstance(value, torch.Tensor):
                    num_bytes["master" if key == "master" else "state"] += value.nbytes
        num_parameters = sum(parameter.numel() for parameter in parameters)
        above = self.optimizer.groups[group.index + 1 :] if self._request.inactive == "above" else []
        with_gradients = [*parameters, *(each for higher in above for each in self._parameters_of(higher))]
        if self._request.state == "discard":
            # The state was offloaded between the turn's updates, and is discarded now.
            waiting = self.offloaded_bytes(peak, group)
            num_bytes["master"] = min(waiting, _FP32 * num_parameters) if self._request.master_kind == "fp32" else 0
            num_bytes["state"] = waiting - num_bytes["master"]
        return group_plan(
            peak,
            name=_name_of(group),
            num_parameters=num_parameters,
            gradient_bytes=self._meter.bytes_of(with_gradients),
            largest_gradient_bytes=max(self._meter.bytes_of([each]) for each in with_gradients),
            state_bytes=num_bytes["state"],
            master_bytes=num_bytes["master"],
            indices=tuple(member.index for member in members),
        )

    def updates_of(self, peak: StepPeak, members: Sequence[Group], place: int) -> list[UpdateWork]:
        """Return the work of each update of equal groups.

        Forward and step are those of the lowest group, which was run. A higher group's backward is shorter, by the
        blocks below it.

        Args:
            peak: Peak of the first group.
            members: All equal groups.
            place: Index of their plan among the plan's groups.
        """
        index_of = {path: index for index, (path, _) in enumerate(find_blocks(self._model, are_needed=False))}
        blocks = [{index_of[layer.name] for layer in each.layers if layer.kind == "block"} for each in members]
        return [
            peak.work.of_update(
                share=1 / len(self.optimizer.groups),
                group=place,
                is_part=partial(_is_part, trained, blocks[0]),
                trained=blocks[0],
                usual=0 if self._request.gradients == "stepped" else -1,  # only the last backward steps
            )
            for trained in blocks
        ]


def _is_part(trained: set[int], run: set[int], place: Place) -> bool:
    """Return whether the backward that trains `trained` has a place of the backward that was run for lower blocks.

    The work of the blocks that trained in the run stands for the work of the blocks in `trained`.
    """
    if place is None or not trained:
        return True
    index, is_again = place
    if is_again:
        return index >= min(trained)
    return index in run or (index >= min(trained) and index not in trained)


class PlannedHiFT(PlannedMethod):
    """HiFT: runs the steps of the equal groups that may have the largest peak."""

    settings = frozenset({*_NAMED_ALIKE, "master", "save_total_limit"})
    bf16_precision = "mixed_hi"
    trains_in_groups = True
    averages_in_buckets = True

    def waits_on_host(self, request: PlanRequest) -> bool:
        """Return whether optimizer state is on the GPU only in its own step."""
        return request.state != "device"

    def measurer(self, request: PlanRequest, model: nn.Module, layout: Layout) -> Measurer:
        """Return a measurer with one optimizer, which makes its updates for the first batch only."""
        run = HiFTRun(model, request, is_shared=layout not in ("single", "ddp"))
        if layout == "ddp" and request.gradients == "stepped":
            trained = [weight.trained for weight in run.optimizer.trained_weights]
            averaged_in_buckets(model, trained, run.optimizer.turns.route.wait_for_means())
        return partial(self._measure, run, model, layout)

    def _measure(
        self, run: HiFTRun, model: nn.Module, layout: Layout, request: PlanRequest, forward: Forward
    ) -> MeasuredSteps:
        groups, waiting, updates = list[GroupPlan](), list[int](), list[UpdateWork]()
        with attached(request, model) as notes:
            for members in alike(run.optimizer.groups, model):
                peak = measure_alike(partial(run.measure, forward=forward), members, request)
                if layout == "fsdp2" and len(members) > 1:
                    # FSDP2 prefetches a block during the backward of every block but the lowest, which has the
                    # embedding below it.
                    both = (peak.before_step, run.measure(members[1], forward).before_step)
                    peak = replace(peak, before_step=max(both, key=lambda census: census.device))
                updates += run.updates_of(peak, members, len(groups))
                groups.append(run.plan_of(peak, members))
                waiting.extend([run.offloaded_bytes(peak, members[0])] * len(members))
        weights = run.optimizer.turns.parked.host_bytes
        host_bytes, disk_bytes = _offloaded_bytes(request, waiting, layout)
        checkpoint_bytes = _checkpoint_bytes(request, groups, model)
        if request.save_total_limit is not None:
            disk_bytes += (request.save_total_limit + 1) * checkpoint_bytes
            notes += (f"{request.save_total_limit} checkpoints on disk, and the one that is being written",)
        elif request.state == "disk":
            size = format_bytes(checkpoint_bytes)
            notes += (f"a checkpoint takes {size} more on disk; --save_total_limit N counts N of them and one more",)
        if request.state == "device":
            groups = _with_state_of_others(groups)
        return MeasuredSteps(
            groups=groups, host_bytes=weights + host_bytes, disk_bytes=disk_bytes, notes=notes, updates=updates
        )

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """Return the options of HiFT: its groups, and the place of their state."""
        arguments = given_arguments(request, (*_NAMED_ALIKE, "save_total_limit"))
        if request.state == "disk":
            arguments += ["--state_dir", "state"]
        # fp32 weights never have masters; bf16 weights have fp32 masters by default.
        if request.has_bf16_weights and request.master_kind != "fp32":
            arguments += ["--master", request.master_kind]
        if request.gradients == "stepped":
            arguments += ["--max_grad_norm", "0"]
        return tuple(arguments)


def _offloaded_bytes(request: PlanRequest, waiting: Sequence[int], layout: Layout) -> tuple[int, int]:
    """Return the bytes in host memory and on disk, from the offloaded bytes of each group."""
    if request.state == "discard":
        return max(waiting), 0  # only one group has state at a time
    if request.state != "disk":
        return sum(waiting), 0
    if layout == "fsdp2":
        return 0, sum(waiting)  # memory-mapped
    return split_bytes(waiting, request.state_ram_bytes)


def _checkpoint_bytes(request: PlanRequest, groups: Sequence[GroupPlan], model: nn.Module) -> int:
    """Return the bytes of a checkpoint: exact weights, master weights and optimizer state."""
    sizes = [size for group in groups for size in [group.state_and_master_bytes] * len(group.indices)]
    state_bytes = max(sizes) if request.state == "discard" else sum(sizes)
    return state_bytes + num_weights(model) * (2 if request.has_bf16_weights else 4)


def _with_state_of_others(groups: Sequence[GroupPlan]) -> list[GroupPlan]:
    """Add to each group's peak the resident state of all other groups."""
    total = sum(group.state_and_master_bytes * len(group.indices) for group in groups)
    return [
        replace(
            group, peak=replace(group.peak, state=group.peak.state + total - group.state_bytes - group.master_bytes)
        )
        for group in groups
    ]


def _name_of(group: Group) -> str:
    """Return the names of a group's layers, of more than two the first and the last."""
    names = [layer.name for layer in group.layers]
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} to {names[-1]}"
