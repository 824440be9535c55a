"""Plans of SFT: a step inside an estimation phase, and one outside.

SFT's growth depends on values, so it is computed from sizes, with the same tensors and lifetimes as in the real code.
The rest of SFT runs unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.planning.counter import WorkCounter
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, PlannedMethod, given_arguments
from slivertune.planning.plan import GroupPlan
from slivertune.planning.replayed import VectorSize, replay, replaying
from slivertune.planning.request import COUNTS, PlanRequest
from slivertune.planning.step import Forward, StepPeak, group_plan, largest_of, measure_step
from slivertune.planning.step_work import StepWork, UpdateWork, Work
from slivertune.sft import SFT, adam
from slivertune.sft import selection as real
from slivertune.sft.communicator import ALONE, Communicator
from slivertune.sft.growth import GrowthEstimator
from slivertune.sft.linear import DeltaLayer
from slivertune.sft.moments import SM3Accumulators
from slivertune.sft.reselection import Reselection

_PHASE_UPDATES = 2
"""Updates that show all tensors of a phase: the pool in its first update, the candidates in all others."""
_OUTSIDE_UPDATES = 2
"""Updates outside of phases: the one after a reselection, and the next, which finds the tensors that it left."""


class SizedGrowthEstimator(GrowthEstimator):
    """Tracks the sizes of a tensor's growth candidates without their positions. See `GrowthEstimator`."""

    def __init__(self, num_elements: int, num_active: int, **settings: Any) -> None:
        super().__init__(num_elements, num_active, **settings)
        self._num_elements = num_elements

    @override
    def feed(
        self, gradient: torch.Tensor, start: int, active: torch.Tensor, communicator: Communicator = ALONE
    ) -> None:
        key = ("feed", gradient.dtype, gradient.numel(), active.numel(), self.sizes)
        replay(
            key,
            lambda: [gradient, active, *self.tensors()],
            lambda: super(SizedGrowthEstimator, self).feed(gradient, start, active, communicator),
            lambda _: self.sizes[-1],
            self.leave,
        )

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Sizes that determine its further allocations, the last for pool or candidates, and pending entrants."""
        entrants = tuple((VectorSize.of(indices), VectorSize.of(values)) for indices, values in self._entrants)
        held = (*self._held_sizes, entrants)
        return self._num_elements, self.num_candidates, self._pool_size, self.has_candidates, held

    @property
    def _held_sizes(self) -> list[VectorSize | None]:
        return [None if each is None else VectorSize.of(each) for each in (self._indices, self._step)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that it holds."""
        held = [self._indices, self._step, *(each for pair in self._entrants for each in pair)]
        return [each for each in held if each is not None]

    def leave(self, held: tuple[Any, ...]) -> None:
        """Allocate tensors of the sizes that a similar estimator holds now.

        Args:
            held: Last entry of that estimator's `sizes`.
        """
        *sizes, entrants = held
        if self._held_sizes != sizes:
            self._indices, self._step = (None if size is None else size.make() for size in sizes)
            self.claim()
        self._entrants = [(indices.make(), values.make()) for indices, values in entrants]

    @override
    def _within(self, indices: torch.Tensor, start: int, length: int) -> slice:
        return slice(0, round(length / self._num_elements * indices.numel()))

    @override
    def _largest_positions(self, values: torch.Tensor, count: int) -> torch.Tensor:
        _mark_largest(values)
        return torch.empty(count, dtype=torch.int64)

    @override
    def _largest_entries(self, flat: torch.Tensor, count: int, barred: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Allocate positions by their wanted count, since few more values round to the threshold."""
        count = max(0, min(count, flat.numel() - sum(positions.numel() for positions in barred)))
        _count_in_bins(real.magnitudes(flat[: real.PIECE]), real.NUM_MAGNITUDES, torch.int32)
        # Chunks find their positions one after the other, and these are joined. Masks are as large as a chunk.
        found = torch.empty(count, dtype=torch.int64)
        real.magnitudes(flat[: real.PIECE])
        positions = found.clone()
        del found
        values = flat.index_select(0, positions)
        real.magnitudes(values)
        stay = torch.ones(count, dtype=torch.bool)
        del stay
        return torch.empty_like(positions)


def _mark_largest(values: torch.Tensor) -> torch.Tensor:
    """Allocate the memory of `largest_of`, but for the few values near the threshold, whose number is not known."""
    values = torch.nan_to_num(values)
    _count_in_bins(real.order_keys(values), real.NUM_KEYS, torch.int64)
    return values > 0


def _count_in_bins(keys: torch.Tensor, num_bins: int, dtype: torch.dtype) -> None:
    """Allocate the memory of a histogram with sums in `dtype`, besides its keys."""
    sums = torch.zeros(num_bins, dtype=dtype)
    if dtype != torch.int64:
        torch.empty(num_bins, dtype=torch.int64)
    del keys
    sums.flip(0)


class SizedReselection(Reselection):
    """Allocates the memory of a reselection, and chooses nothing. See `Reselection`."""

    estimator_class = SizedGrowthEstimator
    work = Work()
    """Work of the last reselection."""

    @override
    def _share_candidates(self, estimators: Mapping[str, GrowthEstimator]) -> None:
        """Keep each tensor's own candidates. Values would move them between tensors, but not change their total."""
        for estimator in estimators.values():
            estimator.pool_magnitudes()

    @override
    def reselect(self, updates: int, options: Mapping[str, Any]) -> None:
        counter = WorkCounter()
        with counter.counting(None):
            self._propose(updates)
        SizedReselection.work = counter.work_of(None)

    def _propose(self, updates: int) -> None:
        proposals = []
        for weight in self._weights:
            estimator, count = weight.estimators.pop(updates, None), weight.num_active
            num_proposed = count
            if isinstance(weight.moments, SM3Accumulators):
                # One product per trained weight, and one per weight that is found: as many as are grown, and up to an
                # eighth more. The first reselection grows the most.
                num_proposed = count + count // 8
                trained = torch.empty(count, 2, dtype=torch.float64)
                products = torch.empty(num_proposed, 6, dtype=torch.float64)
                del trained, products
                # The positions found are kept until all tensors are searched.
                scores = [torch.empty(num_proposed)]
            elif estimator is not None:
                estimate = estimator.estimate()
                scores = [torch.empty(count) for _ in range(3)]
                del estimate
            else:
                continue
            proposals.append(
                (torch.empty(num_proposed, dtype=torch.int32), scores, _mark_largest(-weight.phi.data.abs()))
            )


class SizedDeltaLayer(DeltaLayer):
    """Computes the gradients of one of several layers alike, and only allocates their memory in the others."""

    @override
    def phi_gradient(self, output_gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        serial = self._gradient_sync.begin()
        estimators: list[Any] = list(self.weight.estimators.values())
        for each in estimators:
            each.begin(serial)
        shapes = [(each.dtype, tuple(each.shape)) for each in (output_gradient, inputs)]

        def leave(left: tuple[VectorSize, list[Any]]) -> torch.Tensor:
            gradient, held = left
            for each, sizes in zip(estimators, held, strict=True):
                each.leave(sizes)
            return gradient.make()

        return replay(
            ("gradient", *shapes, self.weight.num_active, *(each.sizes for each in estimators)),
            lambda: [
                output_gradient,
                inputs,
                self.weight.indices,
                *(one for each in estimators for one in each.tensors()),
            ],
            lambda: super(SizedDeltaLayer, self).phi_gradient(output_gradient, inputs),
            lambda gradient: (VectorSize.of(gradient), [each.sizes[-1] for each in estimators]),
            leave,
        )


class SizedSFT(SFT):
    """SFT over a model of fake tensors, in either form."""

    reselection_class = SizedReselection
    layer_class = SizedDeltaLayer


class PlannedSFT(PlannedMethod):
    """Planner of SFT: updates inside an estimation phase, and outside."""

    settings = frozenset(
        {
            *COUNTS,
            "selection",
            "reselection_interval",
            "estimation_steps",
            "replacement_rate",
            "sft_target_modules",
            "train_embeddings",
            "redistribute",
            "packed",
            "sft_momentum",
        }
    )
    is_optimizer = True
    steps_itself = True

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run the updates of an estimation phase, and those outside."""
        with _nothing_kept(), replaying():
            return self._measure(request, model, forward)

    def _measure(self, request: PlanRequest, model: nn.Module, forward: Forward) -> MeasuredSteps:
        steps, interval, num_inside = _shortened(request)
        optimizer = _sized(request, model, steps, interval)
        with attached(request, model) as notes, Ledger(model) as ledger:
            optimizer.claim_state()
            peaks = [
                measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards)
                for _ in range(num_inside + _OUTSIDE_UPDATES)
            ]
        inside, outside = peaks[:num_inside], largest_of(peaks[num_inside:])
        groups: list[GroupPlan] = []

        def add(name: str, peak: StepPeak, state_bytes: int) -> None:
            groups.append(
                group_plan(
                    peak,
                    name=name,
                    num_parameters=optimizer.num_weights,
                    gradient_bytes=peak.gradients,
                    state_bytes=state_bytes,
                    indices=(len(groups),),
                )
            )

        if inside:
            highest = largest_of(inside)
            add("inside an estimation phase", highest, highest.highest.state)
        add("outside of estimation phases", outside, outside.after.state)
        return MeasuredSteps(
            groups=groups,
            own_parameters=[parameter for group in optimizer.param_groups for parameter in group["params"]],
            notes=(*notes, "SFT's search for weights to grow is computed from its sizes"),
            updates=_updates_of(request, [peak.work for peak in peaks], num_inside),
        )

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """Return the arguments for the number of trained weights and their selection."""
        names = [*COUNTS, "sft_target_modules", "train_embeddings", "packed", "sft_momentum", "reselection_interval"]
        # Training refuses options that it would ignore.
        if request.has_phases:
            names.append("estimation_steps")
        if request.reselection_interval > 0:
            names += ["replacement_rate", "redistribute"]
        return ("--selection", request.selection, *given_arguments(request, (*names, "load_in_4bit")))


def _updates_of(request: PlanRequest, steps: Sequence[StepWork], num_inside: int) -> list[UpdateWork]:
    """Return the kinds of updates from one reselection to the next, each with its share.

    Args:
        request: Run with its schedule.
        steps: Work of the shortened run's updates, those inside phases first.
        num_inside: Number of these updates that are inside phases.
    """
    interval, outside, reselection = request.reselection_interval, steps[-1], SizedReselection.work
    usual = replace(outside, step=outside.step - reselection)  # SM3 reselects in every update of the shortened run
    kinds = [(interval - 1, usual), (1, outside)] if interval else [(1, outside)]
    if request.has_phases:
        first, last, length = steps[0], steps[num_inside - 1], request.estimation_steps
        between = replace(steps[1], step=last.step - reselection)
        kinds = [(1, last), (min(length - 1, 1), first), (max(length - 2, 0), between), (interval - length, outside)]
    return [
        work.of_update(share=count / max(1, interval), group=min(1, num_inside)) for count, work in kinds if count > 0
    ]


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Clear the tensors that SFT caches, so that none pass from a run into a plan, or back."""
    adam._corrections.cache_clear()
    try:
        yield
    finally:
        adam._corrections.cache_clear()


def _sized(request: PlanRequest, model: nn.Module, steps: int, interval: int) -> SizedSFT:
    """Make an SFT optimizer with its own schedule.

    Args:
        request: Run with all other settings.
        model: Model of fake tensors.
        steps: Updates per estimation phase (gamma).
        interval: Updates between two reselections (S); 0 for no reselection.
    """
    config = request.sft_config(estimation_steps=steps, reselection_interval=interval)
    with FakeOverrides():
        return SizedSFT(model, config=config, lr=1e-4, total_steps=1000, momentum=request.sft_momentum)


def _shortened(request: PlanRequest) -> tuple[int, int, int]:
    """Return a schedule whose phases overlap as in the run, followed by updates outside of phases.

    The first phase ends at gamma. The second begins at S - gamma and ends at S. Later phases overlap with no other.

    Args:
        request: Run with its schedule.

    Returns:
        gamma and S of the shortened run, and the number of its first updates, which are inside phases.
    """
    if not request.has_phases:
        # SM3 reselects in every update, which shows all memory that it takes.
        return 1, min(request.reselection_interval, 1), 0
    num_overlapping = min(2 * request.estimation_steps - request.reselection_interval, _PHASE_UPDATES)
    if num_overlapping <= 0:
        if request.estimation_steps == 1:
            # A phase of one update never holds its own candidates. The second phase is the first with moments.
            return 1, 3, 3
        return _PHASE_UPDATES, 100, _PHASE_UPDATES
    # The first phase has freed its pool when the second makes its own.
    steps = num_overlapping + _OUTSIDE_UPDATES
    return steps, steps + _OUTSIDE_UPDATES, steps + _OUTSIDE_UPDATES
