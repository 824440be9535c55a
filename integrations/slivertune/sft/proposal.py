"""What a reselection may drop and grow in one tensor (SFT, sections 3.2 and 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slivertune.sft.growth import Estimate, GrowthEstimator
from slivertune.sft.moments import SM3Accumulators
from slivertune.sft.outer_product import largest_products
from slivertune.sft.selection import contains, smallest_positions
from slivertune.sft.weight import SparseWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a reselection may do to one tensor."""

    dropped: torch.Tensor
    """bool, shape (n,): entries to drop."""
    indices: torch.Tensor
    """int32, sorted: positions that may be grown; none is active."""
    scores: torch.Tensor
    """fp32: how much each is worth, not negative."""
    estimate: Estimate | None
    """AG's moments of these positions."""


def propose(
    weight: SparseWeight, estimator: GrowthEstimator | None, num_replaced: int, breadth: int = 1
) -> Proposal | None:
    """Choose what to drop, and what may be grown in its place.

    Dropped are the weights that are nearest to their pretrained values; grown are others that were frozen until
    now, so that as many are really replaced. Where too few are frozen, fewer are.

    Args:
        weight: The tensor.
        estimator: AG's estimation phase that has ended.
        num_replaced: k(i, t).
        breadth: MA's candidates for each trained weight; more than one lets a tensor grow beyond what it dropped.

    Returns:
        The proposal; None if there is nothing to replace, or nothing is known of what could be grown.
    """
    if num_replaced == 0:
        return None
    moments, estimate = weight.moments, None
    if isinstance(moments, SM3Accumulators):
        if not bool(moments.rows.any()):
            # No batch has reached this tensor, so that all its positions are worth the same.
            return None
        # The active ones may all be among the first.
        searched = min((1 + breadth) * weight.num_active, weight.target.num_elements)
        positions, products = largest_products(moments.rows, moments.columns, searched)
        frozen = ~contains(weight.indices, positions.int())
        indices, scores = positions[frozen].int(), products[frozen].pow(0.25).float()
    else:
        estimate = None if estimator is None else estimator.estimate()
        if estimate is None:
            return None
        # Where two phases overlap, the first may have grown some.
        estimate = estimate.select(~contains(weight.indices, estimate.indices))
        indices, scores = estimate.indices, estimate.mean.abs()
    num_replaced = min(num_replaced, indices.numel())
    if num_replaced == 0:
        return None
    dropped = smallest_positions(weight.phi.data.abs(), num_replaced)
    return Proposal(dropped=dropped, indices=indices, scores=scores, estimate=estimate)
