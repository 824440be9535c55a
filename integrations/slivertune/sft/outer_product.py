"""The largest entries of an outer product without the matrix (MA's growth; SFT, equation 10). Pure."""

import torch

from slivertune.sft.selection import largest_of

_BISECTIONS = 100
_SLACK = 1e-12
"""Relative width around a threshold inside which fp64 quotients may misjudge fp64 products."""


def largest_products(rows: torch.Tensor, columns: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the positions (i, j) of the largest r_i * c_j; (r_i c_j)^(1/4), MA's score, has the same order.

    Sorts c and bisects a threshold, counting in each row what reaches it: O((rows + count) log columns) time and
    O(rows + columns + count) memory. Products of fp32 numbers are exact in fp64, so the order is exact.

    An accumulator of zero belongs to a row or column that no trained weight has met; it counts as the smallest one
    that was met, or nothing could ever grow there.

    Args:
        rows: r, fp32, shape (num_rows,), not negative.
        columns: c, fp32, shape (num_columns,), not negative.
        count: Positions to find, at most num_rows * num_columns.

    Returns:
        Sorted int64 flat positions, shape (count,), and their products, fp64; ties go to the lower position.
    """
    r, c = _without_zeros(rows.double()), _without_zeros(columns.double())
    ascending, column_of = c.sort()
    low, high = (r.min() * c.min()) * (1 - _SLACK), (r.max() * c.max()) * (1 + _SLACK)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        reached = int(_starts(ascending, r, middle).neg().add(c.numel()).sum())
        low, high = (middle, high) if reached >= count else (low, middle)
    stops = _starts(ascending, r, high * (1 + _SLACK))
    above = _positions(column_of, stops, c.numel() - stops)
    starts = _starts(ascending, r, low * (1 - _SLACK))
    ties = _positions(column_of, starts, _first_rows(stops - starts, count))
    positions = torch.cat([above, ties]).sort().values
    products = r[positions // c.numel()] * c[positions % c.numel()]
    chosen = largest_of(products, count)
    return positions[chosen], products[chosen]


def _without_zeros(accumulators: torch.Tensor) -> torch.Tensor:
    met = accumulators[accumulators > 0]
    least = met.min() if met.numel() else accumulators.new_ones(())
    return torch.where(accumulators > 0, accumulators, least)


def _starts(ascending: torch.Tensor, rows: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """For each row the place in the sorted columns from which on r_i * c_j reaches the limit; int64."""
    return torch.searchsorted(ascending, limit / rows)


def _positions(column_of: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Flat positions of `counts` sorted columns of every row, from `starts` on."""
    row = torch.repeat_interleave(torch.arange(starts.numel(), device=starts.device), counts)
    offsets = torch.arange(row.numel(), device=starts.device) - (counts.cumsum(0) - counts)[row]
    return row * column_of.numel() + column_of[starts[row] + offsets]


def _first_rows(counts: torch.Tensor, needed: int) -> torch.Tensor:
    """Set to zero the counts of all rows after those that together have enough; all may tie in a young run."""
    before = counts.cumsum(0) - counts
    return torch.where(before < needed, counts, 0)
