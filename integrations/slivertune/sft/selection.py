"""Which weights are trained: the first random choice, the largest of many (SFT, section 3.2). Pure.

Every choice is a total order (larger first, ties to the lower position), so that it does not depend on how a tensor was
cut, on the device or on the rank.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch

PIECE = 2**20
"""Elements looked at together; bounds the temporaries of a search in a dense tensor."""
_BISECTIONS = 100
_SLACK = 1e-12
"""Relative width around a threshold inside which fp64 quotients may misjudge fp64 products."""


def spread_weights(sizes: Sequence[int], total: int) -> list[int]:
    """Share a number of weights out over tensors in proportion to their sizes, at least one each.

    Args:
        sizes: Elements of each tensor, all positive.
        total: Weights to share out.

    Returns:
        Weights of each tensor; they add up to `total` (largest remainders get the rest).

    Raises:
        ValueError: If there are fewer weights than tensors or more than elements.
    """
    if not len(sizes) <= total <= sum(sizes):
        raise ValueError(
            f"{total} weights do not fit: the {len(sizes)} target tensors need at least one each and hold {sum(sizes)}"
        )
    ideal = [total * size / sum(sizes) for size in sizes]
    shares = [max(1, int(value)) for value in ideal]
    step = 1 if sum(shares) < total else -1
    order = sorted(range(len(sizes)), key=lambda at: (shares[at] - ideal[at], at))[::step]
    while sum(shares) != total:
        movable = [at for at in order if (shares[at] < sizes[at] if step > 0 else shares[at] > 1)]
        for at in movable[: abs(total - sum(shares))]:
            shares[at] += step
    return shares


def random_indices(name: str, num_elements: int, count: int, seed: int) -> torch.Tensor:
    """Draw positions of a tensor without replacement, the same on every rank and device.

    Args:
        name: The tensor's name; each gets a stream of its own.
        num_elements: Elements of the tensor.
        count: Positions to draw.
        seed: The run's seed.

    Returns:
        Sorted int32 positions, shape (count,). Takes O(count) memory at densities below a half.
    """
    # The generator keeps 32 bits of its seed, so both go through one hash.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if 2 * count >= num_elements:
        return torch.randperm(num_elements, generator=generator)[:count].sort().values.int()
    drawn = torch.empty(0, dtype=torch.int64)
    while drawn.numel() < count:
        missing = count - drawn.numel()
        more = torch.randint(num_elements, (missing + missing // 8 + 8,), generator=generator)
        drawn = torch.cat([drawn, more]).unique()
    return drawn[torch.randperm(drawn.numel(), generator=generator)[:count]].sort().values.int()


def largest_of(values: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the `count` largest values, ties to the lower position; NaN counts as the largest.

    Args:
        values: Floating, shape (n,).
        count: How many, in [0, n].

    Returns:
        bool, shape (n,).
    """
    if count <= 0 or count >= values.numel():
        return torch.full(values.shape, count > 0, dtype=torch.bool, device=values.device)
    values = torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    limit = torch.topk(values, count, sorted=False).values.min()
    chosen = values > limit
    chosen[torch.nonzero(values == limit).view(-1)[: count - int(chosen.sum())]] = True
    return chosen


def largest_entries(flat: torch.Tensor, count: int, barred: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Find the entries of largest magnitude in a dense tensor with no dense temporary.

    A threshold is estimated from a sample; those above it are few, and the choice among them is exact.

    Args:
        flat: Floating, shape (n,), contiguous.
        count: How many; there may be fewer that are not barred.
        barred: Sets of sorted int64 positions that don't take part, disjoint from each other.

    Returns:
        Sorted int64 positions, shape (count,), or all that are not barred; ties go to the lower position.
    """
    num_barred = sum(positions.numel() for positions in barred)
    count = max(0, min(count, flat.numel() - num_barred))
    if count == 0:
        return torch.arange(0, device=flat.device)
    for limit in _guessed_limits(flat, min(count + num_barred, flat.numel())):
        positions = _positions(flat, limit, barred)
        if positions.numel() >= count:
            break
    else:
        positions = _positions(flat, None, barred)
        if positions.numel() < count:
            return _filled_with_zeros(flat, positions, count, barred)
    return positions.masked_select(largest_of(flat.index_select(0, positions).abs_().float(), count))


def _guessed_limits(flat: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Magnitudes that about `count` entries reach, each lower than the one before; the last is the sample's least."""
    total = flat.numel()
    generator = torch.Generator(device=flat.device).manual_seed(0)
    num_sampled = min(total, max(4096, total // 256))
    places = torch.randint(total, (num_sampled,), generator=generator, device=flat.device)
    sample = flat[places].abs().sort(descending=True).values
    rank = num_sampled * count / total
    for slack in (4.0, 16.0):
        at = int(rank + slack * rank**0.5 + slack)
        if at < num_sampled:
            yield sample[at]


def _positions(flat: torch.Tensor, limit: torch.Tensor | None, barred: Sequence[torch.Tensor]) -> torch.Tensor:
    """Positions of magnitudes of at least a positive `limit`; of all that are not zero if it is None or zero."""
    starts = list(range(0, flat.numel(), PIECE))
    edges = torch.tensor([*starts, flat.numel()], device=flat.device)
    cuts = [torch.searchsorted(positions, edges).tolist() for positions in barred]
    found = []
    for at, start in enumerate(starts):
        piece = flat[start : start + PIECE]
        # NaN is not below the limit.
        mask = piece != 0 if limit is None else ~(piece.abs() < limit) & (piece != 0)
        for positions, cut in zip(barred, cuts, strict=True):
            mask.index_fill_(0, positions[cut[at] : cut[at + 1]] - start, False)
        found.append(torch.nonzero(mask).view(-1) + start)
    return torch.cat(found)


def _filled_with_zeros(
    flat: torch.Tensor, nonzero: torch.Tensor, count: int, barred: Sequence[torch.Tensor]
) -> torch.Tensor:
    # So many first entries hold at least count - len(nonzero) zeros that are not barred.
    is_zero = flat[: count + sum(positions.numel() for positions in barred)] == 0
    for positions in barred:
        is_zero.index_fill_(0, positions[positions < is_zero.numel()], False)
    return torch.cat([nonzero, torch.nonzero(is_zero).view(-1)[: count - nonzero.numel()]]).sort().values


def contains(sorted_indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mark which values are among some sorted positions.

    Args:
        sorted_indices: Integers, shape (n,), increasing.
        values: Integers of the same dtype, shape (m,).

    Returns:
        bool, shape (m,).
    """
    if sorted_indices.numel() == 0:
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    at = torch.searchsorted(sorted_indices, values).clamp_(max=sorted_indices.numel() - 1)
    return sorted_indices[at] == values


def largest_products(rows: torch.Tensor, columns: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the positions (i, j) of the largest r_i * c_j without their matrix (MA's growth; SFT, equation 10).

    MA's score, (r_i c_j)^(1/4), has the same order. Sorts c and bisects a threshold, counting in each row what reaches
    it: O((rows + count) log columns) time and O(rows + columns + count) memory. Products of fp32 numbers are exact in
    fp64, so the order is exact.

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
    # For each row, r_i * c_j reaches a limit from searchsorted(ascending, limit / r_i) on.
    ascending, column_of = c.sort()
    low, high = (r.min() * c.min()) * (1 - _SLACK), (r.max() * c.max()) * (1 + _SLACK)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        reached = int(torch.searchsorted(ascending, middle / r).neg().add(c.numel()).sum())
        low, high = (middle, high) if reached >= count else (low, middle)
    stops = torch.searchsorted(ascending, high * (1 + _SLACK) / r)
    above = _in_sorted_columns(column_of, stops, c.numel() - stops)
    starts = torch.searchsorted(ascending, low * (1 - _SLACK) / r)
    num_ties = stops - starts
    # All may tie in a young run: no rows after those that together have enough.
    num_ties = torch.where(num_ties.cumsum(0) - num_ties < count, num_ties, 0)
    positions = torch.cat([above, _in_sorted_columns(column_of, starts, num_ties)]).sort().values
    products = r[positions // c.numel()] * c[positions % c.numel()]
    chosen = largest_of(products, count)
    return positions[chosen], products[chosen]


def _without_zeros(accumulators: torch.Tensor) -> torch.Tensor:
    met = accumulators[accumulators > 0]
    return torch.where(accumulators > 0, accumulators, met.min() if met.numel() else accumulators.new_ones(()))


def _in_sorted_columns(column_of: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Flat positions of `counts` sorted columns of every row, from `starts` on."""
    row = torch.repeat_interleave(torch.arange(starts.numel(), device=starts.device), counts)
    offsets = torch.arange(row.numel(), device=starts.device) - (counts.cumsum(0) - counts)[row]
    return row * column_of.numel() + column_of[starts[row] + offsets]
