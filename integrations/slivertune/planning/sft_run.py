"""SFT: a step inside an estimation phase, and one outside.

Its growth depends on values, and is computed from sizes: the same tensors as in the real code, for as long. The rest of
SFT runs as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, PlannedMethod, given_arguments
from slivertune.planning.plan import GroupPlan
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward, StepPeak, group_plan, largest_of, measure_step
from slivertune.sft import SFT, SFTConfig, adam
from slivertune.sft import selection as real
from slivertune.sft.growth import GrowthEstimator
from slivertune.sft.moments import SM3Accumulators
from slivertune.sft.reselection import Reselection

_PHASE_UPDATES = 2
"""As many as show all that a phase holds: the pool in its first update, the candidates in all others."""
_OUTSIDE_UPDATES = 2
"""Outside of phases: the update after a reselection, and the next one, which meets what that left."""


class SizedGrowthEstimator(GrowthEstimator):
    """Follows a tensor's growth candidates without knowing which they are; see `GrowthEstimator`."""

    def __init__(self, num_elements: int, num_active: int, **settings: Any) -> None:
        super().__init__(num_elements, num_active, **settings)
        self._num_elements = num_elements

    @override
    def _within(self, indices: torch.Tensor, start: int, length: int) -> slice:
        return slice(0, round(length / self._num_elements * indices.numel()))

    @override
    def _largest_positions(self, values: torch.Tensor, count: int) -> torch.Tensor:
        real.largest_of(values, count)
        return torch.empty(count, dtype=torch.int64)

    @override
    def _largest_entries(self, flat: torch.Tensor, count: int, barred: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """The numbers found follow from the counts: what a sample of the gradient lets through."""
        total, num_barred = flat.numel(), sum(positions.numel() for positions in barred)
        count = max(0, min(count, total - num_barred))
        num_sampled = min(total, max(4096, total // 256))
        sample = flat.new_empty(num_sampled)
        rank = num_sampled * min(count + num_barred, total) / total
        reached = min(total, int(total * (rank + 4.0 * rank**0.5 + 4.0) / num_sampled) + 1)
        # Pieces find their positions one after the other, and these are joined; masks are as large as a piece.
        found = torch.empty(max(count, reached - num_barred), dtype=torch.int64)
        piece = flat[: real.PIECE]
        masks = [~(piece.abs() < sample[0]), piece != 0]
        del masks
        positions = found.clone()
        del found
        magnitudes = flat.index_select(0, positions).abs_().float()
        return self._largest_positions(magnitudes, count)


class SizedReselection(Reselection):
    """Takes what a reselection takes, and chooses nothing; see `Reselection`."""

    estimator_class = SizedGrowthEstimator

    @override
    def reselect(self, updates: int, options: Mapping[str, Any]) -> None:
        proposals = []
        for weight in self._weights:
            estimator, count = weight.estimators.pop(updates, None), weight.num_active
            scores = [torch.empty(count)]
            if isinstance(weight.moments, SM3Accumulators):
                # Twice as many products are searched as weights are trained, and their positions.
                products = torch.empty(2 * count, 2, dtype=torch.float64)
                real.largest_of(products[:, 0], 2 * count - 1)
                del products
            elif estimator is not None:
                estimate = estimator.estimate()
                scores += [torch.empty(count), torch.empty(count)]
                del estimate
            else:
                continue
            proposals.append(
                (torch.empty(count, dtype=torch.int32), scores, real.largest_of(-weight.phi.data.abs(), count))
            )


class SizedSFT(SFT):
    """SFT over a model without data, in either form."""

    reselection_class = SizedReselection


class PlannedSFT(PlannedMethod):
    """SFT: updates inside of an estimation phase, and outside."""

    settings = frozenset({"density", "selection", "reselection_interval", "estimation_steps", "replacement_rate"})
    is_optimizer = True
    steps_itself = True

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run the updates of a phase, and those outside."""
        # No tensor that SFT keeps between calls may pass from a run into a plan, or back.
        adam._corrections.cache_clear()
        try:
            return self._measure(request, model, forward)
        finally:
            adam._corrections.cache_clear()

    def _measure(self, request: PlanRequest, model: nn.Module, forward: Forward) -> MeasuredSteps:
        steps, interval, num_inside = _shortened(request)
        config = SFTConfig(
            density=request.density,
            selection=request.selection,
            estimation_steps=steps,
            reselection_interval=interval,
            replacement_rate=request.replacement_rate,
            form="auto",
        )
        with FakeOverrides():
            optimizer = SizedSFT(model, config=config, lr=1e-4, total_steps=1000)
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
        )

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """How many weights, and how they are chosen."""
        density = () if request.density is None else ("--density", str(request.density))
        return (
            *density,
            "--selection",
            request.selection,
            *given_arguments(request, ("reselection_interval", "estimation_steps", "replacement_rate", "load_in_4bit")),
        )


def _shortened(request: PlanRequest) -> tuple[int, int | None, int]:
    """A schedule in which phases meet as they do in the run, with updates outside of phases after them.

    The first phase ends at gamma, the second at S and begins gamma before that; later ones meet no other.

    Args:
        request: Has the schedule of the run.

    Returns:
        gamma and S of the shortened run, and its first updates that belong to phases.
    """
    if not request.has_phases:
        # SM3 reselects in every update, which shows all it takes.
        return 1, None if request.reselection_interval == 0 else 1, 0
    num_overlapping = min(2 * request.estimation_steps - request.reselection_interval, _PHASE_UPDATES)
    if num_overlapping <= 0:
        if request.estimation_steps == 1:
            # A phase never meets its own candidates; the second is the first to meet moments.
            return 1, 3, 3
        return _PHASE_UPDATES, 100, _PHASE_UPDATES
    # The first phase has its pool behind it when the second makes its own.
    steps = num_overlapping + _OUTSIDE_UPDATES
    return steps, steps + _OUTSIDE_UPDATES, steps + _OUTSIDE_UPDATES
