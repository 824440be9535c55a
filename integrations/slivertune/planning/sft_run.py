"""Plans of SFT: steps inside an estimation phase, and steps outside.

SFT runs as it is, since no size in its search for weights to grow depends on a value. Only `redistribute` decides
numbers by values: a plan leaves each tensor as many weights as it began with, whose total is the same, and holds the
pools and the proposals of all tensors together, as training does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.ledger import claim
from slivertune.planning.counter import WorkCounter
from slivertune.planning.course import CourseLedger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.four_bit import num_weights
from slivertune.planning.methods import MeasuredSteps, Measurer, PlannedMethod, given_arguments
from slivertune.planning.model import attached
from slivertune.planning.parked_weights import PARKING, num_streamed, park
from slivertune.planning.request import COUNTS, PlanRequest
from slivertune.planning.slow_streams import planned_streams
from slivertune.planning.step import Forward, MeasuredGroup, measure_step, weight_bytes
from slivertune.planning.step_work import StepWork, UpdateWork, Work
from slivertune.sft import SFT, SFTConfig, adam
from slivertune.sft.communicator import Communicator
from slivertune.sft.growth import GrowthEstimator
from slivertune.sft.reselection import Proposal, Reselection
from slivertune.sft.targets import Target, count_weights
from slivertune.sft.weight import SparseWeight

_PHASE_UPDATES = 2
"""Updates that show all tensors of a phase: the pool in its first update, the candidates in all others."""
_OUTSIDE_UPDATES = 2
"""Updates outside of phases: the one after a reselection, and the next, which finds the tensors that it left."""


class CountedReselection(Reselection):
    """Counts the work of a reselection, and leaves each tensor its number of weights. See `Reselection`."""

    work = Work()
    """Work of the last one."""

    @override
    def reselect(self, updates: int, options: Mapping[str, Any]) -> None:
        counter = WorkCounter()
        with counter.counting(None):
            super().reselect(updates, options)
        CountedReselection.work = counter.work_of(None)

    @override
    def _share_candidates(self, estimators: Mapping[str, GrowthEstimator]) -> None:
        pools = [each.pool_magnitudes() for each in estimators.values()]
        for pool in pools:
            if pool is not None:
                pool.sort()

    @override
    def _numbers(self, proposals: Sequence[tuple[SparseWeight, Proposal]]) -> list[tuple[int, int]]:
        # At most all scores are of positions that may grow.
        scores = [each.scores if each.may_grow is None else each.scores.clone() for _, each in proposals]
        for each in scores:
            each.sort()
        return [(proposal.most, weight.num_active) for weight, proposal in proposals]


class CountedCommunicator(Communicator):
    """Holds what ranks exchange, and exchanges nothing.

    Args:
        num_ranks: Number of ranks. Their largest entries count as if none had another's.
    """

    is_alone = False

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    @override
    def check(self) -> None:
        pass

    @override
    def union(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        padded = positions.new_full((most,), -1)
        rows = padded.new_empty(self._num_ranks, most)
        return rows.view(-1).sort().values

    @override
    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        claim(torch.cat([tensor.view(-1) for tensor in tensors]), "gradients")


class CountedSFT(SFT):
    """SFT over a model of fake tensors, in either form.

    A run shares out its number of weights with remainders, so that some of equal tensors have one weight more. Here all
    of them have it.
    """

    reselection_class = CountedReselection
    num_counted = 0
    """Number of weights that the run trains."""

    @override
    def _counts(self, targets: tuple[Target, ...], config: SFTConfig) -> list[int]:
        counts = count_weights(targets, config)
        self.num_counted = sum(counts)
        if config.density is not None:
            return counts  # each tensor by itself
        num_elements = sum(target.num_elements for target in targets)
        return [-(-target.num_elements * self.num_counted // num_elements) for target in targets]

    def exchange_among(self, num_ranks: int) -> None:
        """Hold what so many ranks exchange."""
        self._gradient_sync.communicator = CountedCommunicator(num_ranks)


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
            *PARKING,
        }
    )
    is_optimizer = True
    steps_itself = True

    def grows_with_blocks(self, request: PlanRequest, *, are_all_alike: bool) -> bool:
        """Return whether the share of weights that train follows from any block."""
        if request.density is not None:
            return True
        return request.num_weights is None and are_all_alike and not request.train_embeddings

    def measurer(self, request: PlanRequest, model: nn.Module, shared: PlanRequest) -> Measurer:
        """Return a measurer of one run."""
        return _Updates(model, shared)

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """Return the arguments for the number of trained weights and their selection."""
        names = [*COUNTS, "sft_target_modules", "train_embeddings", "packed", "sft_momentum", "reselection_interval"]
        # Training refuses options that it would ignore.
        if request.has_phases:
            names.append("estimation_steps")
        if request.reselection_interval > 0:
            names += ["replacement_rate", "redistribute"]
        names += ["load_in_4bit", *sorted(PARKING)]
        return ("--selection", request.selection, *given_arguments(request, names))


class _Updates(Measurer):
    """Updates inside an estimation phase, and outside.

    Args:
        model: Model of fake tensors.
        shared: Run with its layout over GPUs.
    """

    measures_again = False

    def __init__(self, model: nn.Module, shared: PlanRequest) -> None:
        self._model = model
        self._shared = shared

    @override
    def measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        with _nothing_kept():
            return self._measure(request, forward)

    def _measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        model, shared, (phase_length, interval, num_inside) = self._model, self._shared, _shortened(request)
        optimizer = _counted(request, model, phase_length, interval)
        # ZeRO-3 has released more weights before most is exchanged, at the end of a backward.
        if shared.num_gpus > 1 and shared.layout != "zero3":
            optimizer.exchange_among(shared.num_gpus)
        parked = park(request, model)
        with planned_streams(request), attached(request, model) as notes, CourseLedger(model) as ledger:
            optimizer.claim_state()
            steps = [
                measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards)
                for _ in range(num_inside + _OUTSIDE_UPDATES)
            ]
        inside, outside = steps[:num_inside], steps[num_inside:]
        kinds = [("outside of estimation phases", outside, outside[-1].update.after.state)]
        if inside:
            kinds.insert(0, ("inside an estimation phase", inside, max(each.highest("state") for each in inside)))
        groups = [
            MeasuredGroup(
                steps=tuple(alike),
                name=name,
                num_parameters=optimizer.num_counted,
                gradient_bytes=max(each.gradients for each in alike),
                state_bytes=state_bytes,
            )
            for name, alike, state_bytes in kinds
        ]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return MeasuredSteps(
            groups=tuple(groups),
            num_weights=num_weights(model) - sum(each.numel() for each in own),
            weight_bytes=weight_bytes(model) - sum(each.nbytes for each in own),
            host_bytes=0 if parked is None else parked.host_bytes,
            notes=notes,
            updates=tuple(
                replace(each, num_streamed=num_streamed(parked))
                for each in _updates_of(request, [step.work for step in steps], num_inside)
            ),
        )


def _updates_of(request: PlanRequest, steps: Sequence[StepWork], num_inside: int) -> list[UpdateWork]:
    """Return the kinds of updates from one reselection to the next, each with its share.

    Args:
        request: Run with its schedule.
        steps: Work of the shortened run's updates, those inside phases first.
        num_inside: Number of these updates that are inside phases.
    """
    interval, outside, reselection = request.reselection_interval, steps[-1], CountedReselection.work
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


def _counted(request: PlanRequest, model: nn.Module, steps: int, interval: int) -> CountedSFT:
    """Make an SFT optimizer with its own schedule.

    Args:
        request: Run with all other settings.
        model: Model of fake tensors.
        steps: Updates per estimation phase (gamma).
        interval: Updates between two reselections (S); 0 for no reselection.
    """
    form = {"form": "layer"} if request.parks else {}
    config = request.sft_config(estimation_steps=steps, reselection_interval=interval, **form)
    with FakeOverrides():
        return CountedSFT(model, config=config, lr=1e-4, total_steps=1000, momentum=request.sft_momentum)


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
