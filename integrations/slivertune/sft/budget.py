"""How many weights each tensor grows: as many as it dropped, or shared out by worth. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slivertune.sft.selection import largest_of

LEAST_SHARE = 0.25
MOST_SHARE = 4.0
"""A redistributed tensor keeps between these multiples of the weights that it began with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRequest:
    """A tensor that takes part in sharing out."""

    scores: torch.Tensor
    """fp32, shape (m,): worth of each position it could take."""
    num_kept: int
    """Weights that it has anyway."""
    share: int
    """Weights that it began with."""


def share_out(requests: Sequence[BudgetRequest], total: int) -> list[int]:
    """Give positions to the highest scores over all tensors, within each tensor's bounds.

    A tensor ends with a quarter to four times its share, as far as its positions and the total allow.

    Args:
        requests: The tensors.
        total: Positions to give away, at most as many as there are.

    Returns:
        Positions for each tensor; they add up to `total`.
    """
    free = [each.scores.numel() for each in requests]
    lows = [
        min(most, max(0, math.ceil(LEAST_SHARE * each.share) - each.num_kept))
        for each, most in zip(requests, free, strict=True)
    ]
    highs = [
        min(most, max(0, int(MOST_SHARE * each.share) - each.num_kept))
        for each, most in zip(requests, free, strict=True)
    ]
    if sum(lows) > total:
        lows = [0] * len(requests)
    if sum(highs) < total:
        highs = free
    ranges = [
        each.scores.sort(descending=True).values[low:high].cpu()
        for each, low, high in zip(requests, lows, highs, strict=True)
    ]
    chosen = largest_of(torch.cat(ranges), total - sum(lows))
    extra = [int(part.sum()) for part in chosen.split([part.numel() for part in ranges])]
    return [low + more for low, more in zip(lows, extra, strict=True)]
