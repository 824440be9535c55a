"""Plans of HiFT: find the groups that differ, and measure the steps of each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.byte_text import format_bytes
from slivertune.core.layers import find_blocks, find_layers
from slivertune.core.layout import Layout
from slivertune.hift.disk import split_bytes
from slivertune.hift.left_out import tables_of
from slivertune.hift.offloaded_state import OffloadedState
from slivertune.hift.rotation import Group, cut_groups
from slivertune.planning.alike_groups import alike, places_to_measure
from slivertune.planning.course import CourseLedger
from slivertune.planning.extension import ExtensionError
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.four_bit import num_weights
from slivertune.planning.hift_optimizer import begin_forward, hift_over, meet_gradients
from slivertune.planning.layouts import averaged_in_buckets
from slivertune.planning.methods import MeasuredSteps, Measurer, PlannedMethod, PlannedSteps, given_arguments
from slivertune.planning.model import attached
from slivertune.planning.optimizers import with_trainer_overrides
from slivertune.planning.plan import GroupPlan
from slivertune.planning.request import PlanRequest
from slivertune.planning.slow_streams import planned_streams
from slivertune.planning.step import (
    Forward,
    GradientMeter,
    MeasuredGroup,
    MeasuredStep,
    MeasuredUpdate,
    PhaseCourse,
    measure_step,
    measure_update,
    weight_bytes,
    with_first,
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

    backward: PhaseCourse
    """Arrival of the gradients of the first update."""
    first: MeasuredUpdate
    second: MeasuredUpdate
    state: dict[str, Any]
    """State of the optimizer between the two updates."""
    tables: Sequence[torch.Tensor]
    """Tensors on the device that optimizers keep beside this state."""


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
            # State that is discarded is offloaded between a turn's updates, even if the second is not run.
            self._updates_a_turn = 2 if request.state == "discard" and not throws_away else self._num_updates
            self.optimizer = hift_over(model, request, updates_a_turn=self._updates_a_turn)
            with FakeOverrides():
                self.optimizer.turns.state_sizes()  # trial steps on parameters of its own, in no update
        self._learning_rate = self.optimizer.param_groups[0]["lr"]
        self._at_start = self.optimizer.state_dict()
        self._known: dict[int, _KnownTurn] = {}
        self._offloaded = Counter[int]()
        """Most bytes by group that held its masters and state after an update."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that all groups share: parked weights, and the gradients of one group."""
        turns = self.optimizer.turns
        return turns.parked.host_bytes + turns.parked.copied_bytes + turns.route.host_bytes

    def measure(self, group: Group, forward: Forward) -> tuple[MeasuredStep, ...]:
        """Measure a group's first update and a later one, without the state of other groups.

        A second call for the same group runs only the forward and the backward, if `_can_be_taken_up`.

        Args:
            group: Group to measure.
            forward: Forward of the model on its batch.

        Returns:
            Steps, of which the larger peak counts.
        """
        with planned_streams(self._request):
            if group.index in self._known:
                return self._measure_again(group, forward, self._known[group.index])
            steps = self._measure_second(group, forward) if self._num_updates > 1 else ()
            return steps or self._measure_all(group, forward)

    def _measure_all(self, group: Group, forward: Forward) -> tuple[MeasuredStep, ...]:
        self._begin_turn(group, self._at_start)
        steps = []
        with CourseLedger(self._model) as ledger:
            for _ in range(self._num_updates):
                steps.append(self._measure_step(ledger, forward))
                self._note_offloaded(group)
                # Text reaches no image tower, so that the turns of the tower's groups pass without an update.
                if self.optimizer.skipped_turns and (self._request.task != "image_text" or self._request.images):
                    raise RuntimeError(f"group {group.index} lost its turn: no gradient reached its parameters")
        return tuple(steps)

    def _measure_step(
        self, ledger: CourseLedger, forward: Forward, known: MeasuredUpdate | None = None
    ) -> MeasuredStep:
        return measure_step(
            ledger,
            forward,
            self.optimizer,
            num_backwards=self._request.num_backwards,
            known=known,
            blocks_of=self._model,
        )

    def _measure_second(self, group: Group, forward: Forward) -> tuple[MeasuredStep, ...]:
        """Measure as `_measure_all` does, but run only the step of the first update, with arbitrary gradients.

        The first forward and backward have the tensors of the second ones, and no state yet. Nothing is returned if
        the backward does not reach all parameters of the group.
        """
        parameters = self._parameters_of(group)
        self._begin_turn(group, self._at_start)
        with CourseLedger(self._model) as ledger:
            ledger.end_course()
            meet_gradients(self.optimizer, self._model, forward)
            backward = PhaseCourse(phase="backward", course=ledger.end_course())
            first = measure_update(ledger, self.optimizer)
            self._note_offloaded(group)
            self._meter.forget(parameters)
            second = self._measure_step(ledger, forward)
            self._note_offloaded(group)
        if not self._meter.has_seen(parameters):
            return ()
        if self._can_be_taken_up:
            tables = [each for chunk in self.optimizer.turns.states[group.index].chunks for each in tables_of(chunk)]
            state = self.optimizer.state_dict()
            self._known[group.index] = _KnownTurn(backward, first, second.update, state, tables)
        return (with_first(second, first, backward),)

    def _measure_again(self, group: Group, forward: Forward, known: "_KnownTurn") -> tuple[MeasuredStep, ...]:
        self._begin_turn(group, known.state, num_updates=1)
        with CourseLedger(self._model) as ledger:
            # Parked weights of the last group leave, and those of this one arrive, as in its first update.
            begin_forward(self._model, forward)
            with FakeOverrides():
                self.optimizer.turns.parked.arrive()
            ledger.track(known.tables)
            second = self._measure_step(ledger, forward, known.second)
        return (with_first(second, known.first, known.backward),)

    @property
    def _can_be_taken_up(self) -> bool:
        """Whether a turn's state is offloaded between its updates, and no update is made in a backward."""
        request = self._request
        return request.state in ("host", "disk") and request.gradients != "stepped"

    def _note_offloaded(self, group: Group) -> None:
        """Note the bytes of a group's offloaded state after an update. The last one of a turn may discard it."""
        state = self.optimizer.turns.states[group.index]
        if isinstance(state, OffloadedState):
            self._offloaded[group.index] = max(self._offloaded[group.index], state.num_bytes)

    def _begin_turn(self, group: Group, state: dict[str, Any], num_updates: int = 0) -> None:
        """Start a group's turn, after `num_updates` of its updates."""
        turn = {"updates": group.index * self._updates_a_turn + num_updates, "held_lr": [self._learning_rate]}
        self.optimizer.load_state_dict({**state, "hift": {**state["hift"], **turn}})
        with FakeOverrides():
            self.optimizer.turns.parked.make_codes()

    def _parameters_of(self, group: Group) -> list[nn.Parameter]:
        named = dict(self._model.named_parameters())
        return [named[name] for name in group.parameter_names]

    def measured(
        self, steps: Sequence[MeasuredStep], group: Group, passes: Sequence[MeasuredStep] = ()
    ) -> MeasuredGroup:
        """Return the measurements of a group.

        Args:
            steps: Steps of this group and of groups alike, of which the last is of this group, measured last.
            group: The group.
            passes: Steps of groups alike, of which only forwards and backwards count.
        """
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
        waiting = self._offloaded[group.index]
        if self._request.state == "discard":
            # The state was offloaded between the turn's updates, and is discarded now.
            num_bytes["master"] = min(waiting, _FP32 * num_parameters) if self._request.master_kind == "fp32" else 0
            num_bytes["state"] = waiting - num_bytes["master"]
        return MeasuredGroup(
            steps=tuple(steps),
            passes=tuple(passes),
            name="",
            num_parameters=num_parameters,
            gradient_bytes=self._meter.bytes_of(with_gradients),
            largest_gradient_bytes=max(self._meter.bytes_of([each]) for each in with_gradients),
            state_bytes=num_bytes["state"],
            master_bytes=num_bytes["master"],
            offloaded_bytes=waiting,
            work=steps[-1].work,
        )


class PlannedHiFT(PlannedMethod):
    """HiFT: runs the steps of the equal groups that may have the largest peak."""

    settings = frozenset({*_NAMED_ALIKE, "master", "save_total_limit"})
    bf16_precision = "mixed_hi"
    trains_in_groups = True
    averages_in_buckets = True

    def waits_on_host(self, request: PlanRequest) -> bool:
        """Return whether optimizer state is on the GPU only in its own step."""
        return request.state != "device"

    def grows_with_blocks(self, request: PlanRequest, *, are_all_alike: bool) -> bool:
        """Return whether the layers are the model's own."""
        return request.layers is None

    def measurer(self, request: PlanRequest, model: nn.Module, shared: PlanRequest) -> Measurer:
        """Return a measurer with one optimizer, which makes its updates for the first batch only."""
        return _Turns(request, model, shared.layout)

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


class _Turns(Measurer):
    """Turns of the groups that differ.

    Args:
        request: One of the runs, on one GPU.
        model: Model of fake tensors.
        layout: Layout of the run over GPUs.
    """

    def __init__(self, request: PlanRequest, model: nn.Module, layout: Layout) -> None:
        self._request = request
        self._model = model
        self._layout = layout
        config = request.hift_config()
        trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        groups = cut_groups(find_layers(model, config.layers), config.layers_per_group, trained)
        self._num_groups = len(groups)
        self._alike = alike(groups, model)
        """Equal groups, in the order of `MeasuredSteps.groups`."""

    @cached_property
    def _run(self) -> HiFTRun:
        run = HiFTRun(self._model, self._request, is_shared=self._layout not in ("single", "ddp"))
        if self._layout == "ddp" and self._request.gradients == "stepped":
            trained = [weight.trained for weight in run.optimizer.trained_weights]
            averaged_in_buckets(self._model, trained, run.optimizer.turns.route.wait_for_means())
        return run

    @override
    def measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        with with_trainer_overrides(self._model, request.optimizer):
            run, groups = self._run, list[MeasuredGroup]()
            with attached(request, self._model) as notes:
                for members in self._alike:
                    places = places_to_measure(members, request)
                    steps = [step for place in places for step in run.measure(members[place], forward)]
                    # FSDP2 prefetches a block during the backward of every block but the lowest, which has the
                    # embedding below it.
                    passes = run.measure(members[1], forward) if self._layout == "fsdp2" and len(members) > 1 else ()
                    groups.append(run.measured(steps, members[0], passes))
        return MeasuredSteps(
            groups=tuple(groups),
            num_weights=num_weights(self._model),
            weight_bytes=weight_bytes(self._model),
            host_bytes=run.host_bytes,
            notes=notes,
        )

    @override
    def planned(self, request: PlanRequest, steps: MeasuredSteps) -> PlannedSteps:
        groups, waiting, updates, notes = list[GroupPlan](), list[int](), list[UpdateWork](), steps.notes
        if len(self._alike) != len(steps.groups):
            raise ExtensionError(f"{len(steps.groups)} kinds of groups, of {len(self._alike)}")
        for members, group in zip(self._alike, steps.groups, strict=True):
            updates += self._updates_of(group, members, len(groups))
            named = replace(group, name=_name_of(members[0]))
            groups.append(named.plan(*(member.index for member in members)))
            waiting += [group.offloaded_bytes] * len(members)
        host_bytes, disk_bytes = _offloaded_bytes(request, waiting, self._layout)
        checkpoint_bytes = _checkpoint_bytes(request, groups, steps.num_weights)
        if request.save_total_limit is not None:
            disk_bytes += (request.save_total_limit + 1) * checkpoint_bytes
            notes += (f"{request.save_total_limit} checkpoints on disk, and the one that is being written",)
        elif request.state == "disk":
            size = format_bytes(checkpoint_bytes)
            notes += (f"a checkpoint takes {size} more on disk; --save_total_limit N counts N of them and one more",)
        return PlannedSteps(
            groups=_with_state_of_others(groups) if request.state == "device" else groups,
            host_bytes=steps.host_bytes + host_bytes,
            disk_bytes=disk_bytes,
            notes=notes,
            updates=updates,
        )

    def _updates_of(self, group: MeasuredGroup, members: Sequence[Group], place: int) -> list[UpdateWork]:
        """Return the work of each update of equal groups.

        Forward and step are those of the lowest group, which was run. A higher group's backward is shorter, by the
        blocks below it.

        Args:
            group: Measurements of the lowest group.
            members: All equal groups.
            place: Index of their plan among the plan's groups.
        """
        assert group.work is not None
        index_of = {
            path: index
            for index, (path, _) in enumerate(find_blocks(self._model, are_needed=False, with_attention=False))
        }
        blocks = [{index_of[layer.name] for layer in each.layers if layer.kind == "block"} for each in members]
        return [
            group.work.of_update(
                share=1 / self._num_groups,
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


def _offloaded_bytes(request: PlanRequest, waiting: Sequence[int], layout: Layout) -> tuple[int, int]:
    """Return the bytes in host memory and on disk, from the offloaded bytes of each group."""
    if request.state == "discard":
        return max(waiting), 0  # only one group has state at a time
    if request.state != "disk":
        return sum(waiting), 0
    if layout == "fsdp2":
        return 0, sum(waiting)  # memory-mapped
    return split_bytes(waiting, request.state_ram_bytes)


def _checkpoint_bytes(request: PlanRequest, groups: Sequence[GroupPlan], num_weights: int) -> int:
    """Return the bytes of a checkpoint: exact weights, master weights and optimizer state."""
    sizes = [size for group in groups for size in [group.state_and_master_bytes] * len(group.indices)]
    state_bytes = max(sizes) if request.state == "discard" else sum(sizes)
    return state_bytes + num_weights * (2 if request.has_bf16_weights else 4)


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
