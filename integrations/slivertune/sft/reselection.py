"""Reselection: its schedule, the dropped and grown weights, and estimation phases (SFT, sections 3.2 and 3.3).

Redistribution of weights between tensors is not in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slivertune.sft.config import SFTConfig
from slivertune.sft.delta_parameters import DeltaParameters
from slivertune.sft.growth import POOL_FACTOR, Estimate, GrowthEstimator
from slivertune.sft.largest import NONE, entries_at, largest_of, largest_positions, largest_products, product_scores
from slivertune.sft.moments import SM3Accumulators
from slivertune.sft.selection import contains
from slivertune.sft.weight import SparseWeight

LEAST_SHARE = 0.25
MOST_SHARE = 4.0
"""Bounds of a redistributed tensor's number of weights, as multiples of its first number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Schedule of reselections by update counts t, which start from 1: t is the number of finished updates."""

    first: int | None
    """Update t of the first reselection, which replaces all weights, or None if the choice never changes."""
    interval: int
    """Interval in updates (S), at whose multiples later reselections take place."""
    estimation_steps: int
    """Updates in an estimation phase (gamma), or 0 if nothing is estimated (MA)."""
    replacement_rate: float
    """Peak share of weights that a reselection replaces (alpha)."""
    total_steps: int
    """Updates in the whole run (T), after which nothing is reselected."""

    @classmethod
    def of(cls, config: SFTConfig, total_steps: int) -> Schedule:
        """Make the schedule of a run.

        Args:
            config: Settings.
            total_steps: Updates in the whole run (T).

        Raises:
            ValueError: If T is not positive.
        """
        if type(total_steps) is not int or total_steps < 1:
            raise ValueError(
                f"total_steps={total_steps!r} must be a positive integer, the updates of the whole run. Pass the "
                "number of calls of step()"
            )
        estimation_steps = config.estimation_steps if config.selection == "accumulated_gradient" else 0
        interval = config.reselection_interval
        first = (estimation_steps or interval) if interval else None
        return cls(
            # The first one replaces all weights. After the last update the new ones would learn nothing.
            first=None if first is None or first >= total_steps else first,
            interval=interval or 1,
            estimation_steps=estimation_steps,
            replacement_rate=config.replacement_rate,
            total_steps=total_steps,
        )

    def next_reselection(self, updates: int) -> int | None:
        """Return the first t greater than `updates` at which weights are reselected, or None if none is to come."""
        if self.first is None:
            return None
        following = self.first if updates < self.first else (updates // self.interval + 1) * self.interval
        return following if following <= self.total_steps else None

    def num_reselections(self, updates: int) -> int:
        """Count the reselections in the first `updates` updates."""
        updates = min(updates, self.total_steps)
        if self.first is None or updates < self.first:
            return 0
        return 1 + updates // self.interval - self.first // self.interval

    def num_replaced(self, updates: int, num_active: int) -> int:
        """Compute k(i, t), the number of a tensor's weights that the reselection at t = `updates` replaces.

        Args:
            updates: Number of finished updates (t).
            num_active: Number of trained weights of the tensor (d_phi(i)).
        """
        if updates == self.first:
            return num_active
        return int(self.replacement_rate * (max(0, self.total_steps - updates) / self.total_steps) * num_active)

    def grew_in_phase(self, end: int) -> bool:
        """Return whether a reselection took place within the estimation phase that ends at `end`."""
        return self.num_reselections(end - 1) > self.num_reselections(end - self.estimation_steps)

    def open_phases(self, updates: int) -> tuple[int, ...]:
        """List the reselections whose estimation phases contain the update after `updates` finished ones.

        If S < 2 gamma, the first phase, which ends at gamma, overlaps the second, which ends at S.
        """
        found: list[int] = []
        end = self.next_reselection(updates)
        while end is not None and end - updates <= self.estimation_steps:
            found.append(end)
            end = self.next_reselection(end)
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Entries of one tensor that a reselection may grow."""

    most: int
    """Largest number of entries to replace."""
    indices: torch.Tensor
    """Positions, int32, sorted, shape (m,)."""
    scores: torch.Tensor
    """Scores of these positions, fp32, not negative, shape (m,)."""
    may_grow: torch.Tensor | None
    """Mask of the positions that may be grown, bool, shape (m,), or None for all."""
    estimate: Estimate | None
    """AG's estimate at these positions, or None with MA."""


def propose(
    weight: SparseWeight,
    estimator: GrowthEstimator | None,
    num_replaced: int,
    *,
    grew_in_phase: bool,
    breadth: int,
) -> Proposal | None:
    """Score the positions that may be grown in place of weights that are dropped.

    Grown positions were frozen until now, so that as many are really replaced. If too few are frozen, fewer are.

    Args:
        weight: The tensor.
        estimator: AG's estimator, whose phase has ended.
        num_replaced: Number of weights to replace, k(i, t).
        grew_in_phase: Whether candidates may have been grown since they were chosen.
        breadth: MA's candidates per trained weight; more than one lets a tensor grow beyond the number that it dropped.

    Returns:
        The proposal; None if there is nothing to replace, or no candidate is known.
    """
    if num_replaced == 0:
        return None
    moments, estimate = weight.moments, None
    may_grow: torch.Tensor | None = None
    if isinstance(moments, SM3Accumulators):
        # All active positions may be among the largest products.
        num_searched = min((1 + breadth) * weight.num_active, weight.target.num_elements)
        positions = largest_products(moments.rows, moments.columns, num_searched)
        scores = product_scores(moments.rows, moments.columns, positions)
        indices = positions.int()
        # If no batch has reached this tensor, all its positions have the same score.
        is_frozen = torch.ones(weight.target.num_elements, dtype=torch.bool, device=positions.device)
        is_frozen.index_fill_(0, weight.indices.long(), False)
        may_grow = is_frozen.index_select(0, positions).logical_and_(moments.rows.any())
    else:
        estimate = None if estimator is None else estimator.estimate()
        if estimate is None:
            return None
        indices, scores = estimate.indices, estimate.mean.abs()
        if grew_in_phase:
            may_grow = ~contains(weight.indices, indices)
    most = min(num_replaced, indices.numel())
    return Proposal(most=most, indices=indices, scores=scores, may_grow=may_grow, estimate=estimate)


class Reselection:
    """Reselects the trained weights by the tensors' state alone, so that every rank makes the same choice.

    Args:
        weights: The trained tensors.
        shares: First number of trained weights of each tensor.
        schedule: Times of reselection, and numbers of replaced weights.
        config: Settings.
    """

    def __init__(
        self, weights: Sequence[SparseWeight], shares: Sequence[int], schedule: Schedule, config: SFTConfig
    ) -> None:
        self._weights = weights
        self.shares = {weight.name: share for weight, share in zip(weights, shares, strict=True)}
        """First number of trained weights of each tensor, by name."""
        self.schedule = schedule
        """Times of reselection, and numbers of replaced weights."""
        self._config = config

    def open_phases(self, updates: int) -> None:
        """Create estimators for the tensors that will grow at the end of a phase that contains the next update.

        Args:
            updates: Number of finished updates (t).
        """
        for number, end in enumerate(self.schedule.open_phases(updates)):
            for weight in self._weights:
                if self._can_grow(weight, end) and end not in weight.estimators:
                    # An earlier phase may grow `num_active` candidates. A later reselection needs this many.
                    num_spare = math.ceil(self._config.replacement_rate * weight.num_active) if number else 0
                    weight.estimators[end] = GrowthEstimator(
                        weight.target.num_elements, weight.num_active, num_spare=num_spare, packed=self._config.packed
                    )

    def _can_grow(self, weight: SparseWeight, end: int) -> bool:
        """Return whether the reselection at `end` may replace weights of a tensor."""
        return weight.num_active < weight.target.num_elements and (
            self.schedule.num_replaced(end, weight.num_active) > 0
        )

    def end_estimates(self, updates: int, delta_parameters: DeltaParameters) -> None:
        """Count the running update's gradients in the phases that contain it.

        Args:
            updates: Number of finished updates.
            delta_parameters: Source of the running update's number, and of the factor applied to its gradients.
        """
        scale = delta_parameters.scale()
        for end in self.schedule.open_phases(updates):
            found = {each.name: each.estimators[end] for each in self._weights if end in each.estimators}
            if self._config.redistribute:
                self._share_candidates(found)
            for estimator in found.values():
                estimator.end_step(delta_parameters.serial, scale)

    def _share_candidates(self, estimators: Mapping[str, GrowthEstimator]) -> None:
        """Redistribute the candidates over the tensors after a phase's first update, by the largest gradients."""
        pools = [(name, each, each.pool_magnitudes()) for name, each in estimators.items()]
        filled = [(name, each, pool) for name, each, pool in pools if pool is not None]
        if not filled:
            return
        requests = [(pool, self.shares[name], 0) for name, _, pool in filled]
        counts = share_out(requests, sum(each.num_candidates for _, each, _ in filled))
        for (_, estimator, _), count in zip(filled, counts, strict=True):
            estimator.num_candidates = count

    def reselect(self, updates: int, options: Mapping[str, Any]) -> None:
        """Drop and grow weights of every tensor (SFT, section 3.2).

        Args:
            updates: Number of finished updates (t), a time of reselection.
            options: Options of the param group.
        """
        proposals: list[tuple[SparseWeight, Proposal]] = []
        breadth = POOL_FACTOR if self._config.redistribute else 1
        grew_in_phase = self.schedule.grew_in_phase(updates)
        for weight in self._weights:
            proposal = propose(
                weight,
                weight.estimators.pop(updates, None),  # which nothing else holds, so that its sums are freed
                self.schedule.num_replaced(updates, weight.num_active),
                grew_in_phase=grew_in_phase,
                breadth=breadth,
            )
            if proposal is None:
                continue
            if self._config.redistribute:
                proposals.append((weight, proposal))
            else:
                _replace(weight, proposal, proposal.most, options)
        if proposals:
            self._redistribute(proposals, options)
        for weight in self._weights:
            # A phase that waits for its first gradient begins anew with the present weights, as after a resume.
            weight.estimators = {
                end: each
                for end, each in weight.estimators.items()
                if each.has_candidates and self._can_grow(weight, end)
            }

    def _redistribute(self, proposals: Sequence[tuple[SparseWeight, Proposal]], options: Mapping[str, Any]) -> None:
        """Replace weights of all tensors together. A GPU waits for the numbers, which decide the sizes of the state."""
        for (weight, proposal), (num_grown, num_active) in zip(proposals, self._numbers(proposals), strict=True):
            _replace(weight, proposal, num_grown, options, num_active)

    def _numbers(self, proposals: Sequence[tuple[SparseWeight, Proposal]]) -> list[tuple[int, int]]:
        """Return for each tensor the number of positions to grow, and of its weights afterwards."""
        dropped = [int(_num_dropped(proposal)) for _, proposal in proposals]
        requests = [
            (_scores_of(proposal), self.shares[weight.name], weight.num_active - count)
            for (weight, proposal), count in zip(proposals, dropped, strict=True)
        ]
        counts = share_out(requests, sum(dropped))
        return [(count, request[2] + count) for request, count in zip(requests, counts, strict=True)]


def _scores_of(proposal: Proposal) -> torch.Tensor:
    return proposal.scores if proposal.may_grow is None else proposal.scores[proposal.may_grow]


def _num_dropped(proposal: Proposal) -> int | torch.Tensor:
    return proposal.most if proposal.may_grow is None else proposal.may_grow.sum().clamp(max=proposal.most)


def _replace(
    weight: SparseWeight,
    proposal: Proposal,
    num_grown: int,
    options: Mapping[str, Any],
    num_active: int | None = None,
) -> None:
    """Drop the weights that are nearest to their pretrained values, and grow the positions of the largest scores.

    Args:
        weight: The tensor.
        proposal: Its positions.
        num_grown: Largest number of positions to grow.
        options: Options of the param group.
        num_active: Number of weights afterwards, if it changes.
    """
    dropped = largest_of(weight.phi.data, _num_dropped(proposal), None, True)
    chosen = largest_positions(proposal.scores, num_grown, proposal.may_grow)
    grown = entries_at(proposal.indices, chosen, NONE)
    estimate = None if proposal.estimate is None else proposal.estimate.select(chosen)
    weight.replace(dropped, grown, estimate, options, num_active)


def share_out(requests: Sequence[tuple[torch.Tensor, int, int]], total: int) -> list[int]:
    """Assign positions to the highest scores over all tensors, within each tensor's bounds.

    A tensor ends with a quarter to four times its share, as far as its positions and the total allow.

    Args:
        requests: For each tensor: scores of the positions that it could take, fp32, shape (m,); its first number of
            weights; and the number of weights that it keeps anyway.
        total: Number of positions to assign, at most as many as there are.

    Returns:
        Number of positions for each tensor; they add up to `total`.
    """
    free = [scores.numel() for scores, _, _ in requests]
    lows = [min(len(scores), max(0, math.ceil(LEAST_SHARE * share) - kept)) for scores, share, kept in requests]
    highs = [min(len(scores), max(0, int(MOST_SHARE * share) - kept)) for scores, share, kept in requests]
    if sum(lows) > total:
        lows = [0] * len(requests)
    if sum(highs) < total:
        highs = free
    ranges = [
        scores.sort(descending=True).values[low:high].cpu()
        for (scores, _, _), low, high in zip(requests, lows, highs, strict=True)
    ]
    chosen = largest_of(torch.cat(ranges), total - sum(lows)).split([part.numel() for part in ranges])
    return [low + int(more.sum()) for low, more in zip(lows, chosen, strict=True)]
