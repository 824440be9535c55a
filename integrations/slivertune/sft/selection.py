"""Selection of trained weights: the first random choice, and the largest of many (SFT, section 3.2). Pure.

Every choice is a total order (larger first, ties to the lower position), so it does not depend on the cutting of a
tensor, on the device or on the rank.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

PIECE = 2**20
"""Number of elements examined together, which bounds the temporaries of a search in a dense tensor."""
NUM_MAGNITUDES = 2**15
_MAGNITUDE = NUM_MAGNITUDES - 1
"""Mask of the bits of a bf16 other than its sign."""
_INFINITE = 0x7F80
"""Magnitude bits of an infinite bf16."""
NUM_KEYS = 2**13
_BISECTIONS = 100
_SLACK = 1e-12
"""Relative width around a threshold inside which fp64 quotients may misjudge fp64 products."""
_SCORE_SLACK = 2.0**-19
"""Relative difference above which the fourth roots of two products differ in fp32, too."""


def spread_weights(sizes: Sequence[int], total: int) -> list[int]:
    """Distribute a number of weights over tensors in proportion to their sizes, at least one per tensor.

    Args:
        sizes: Numbers of elements of the tensors, all positive.
        total: Number of weights to distribute.

    Returns:
        Number of weights of each tensor; they add up to `total` (largest remainders get the rest).

    Raises:
        ValueError: If there are fewer weights than tensors or more than elements.
    """
    if not len(sizes) <= total <= sum(sizes):
        raise ValueError(
            f"{total} weights do not fit: the {len(sizes)} target tensors need at least one each and hold "
            f"{sum(sizes)}. Choose a number between the two"
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
        name: Name of the tensor; each name has its own random stream.
        num_elements: Number of elements of the tensor.
        count: Number of positions to draw.
        seed: Seed of the run.

    Returns:
        Sorted int32 positions, shape (count,). The draw takes O(count) memory at densities below a half.
    """
    # The generator uses 32 bits of its seed, so seed and name go through one hash.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if 2 * count >= num_elements:
        return torch.randperm(num_elements, generator=generator, device="cpu")[:count].sort().values.int()
    drawn = torch.empty(0, dtype=torch.int64, device="cpu")
    while drawn.numel() < count:
        missing = count - drawn.numel()
        more = torch.randint(num_elements, (missing + missing // 8 + 8,), generator=generator, device="cpu")
        drawn = torch.cat([drawn, more]).unique()
    return drawn[torch.randperm(drawn.numel(), generator=generator, device="cpu")[:count]].sort().values.int()


def largest_of(values: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the `count` largest values. Ties go to the lower position, and NaN counts as the largest.

    Args:
        values: Floating-point values, shape (n,).
        count: Number of values to mark, in [0, n].

    Returns:
        Mask, bool, shape (n,).
    """
    if count <= 0 or count >= values.numel():
        return torch.full(values.shape, count > 0, dtype=torch.bool, device=values.device)
    values = torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    limit = _kth_largest(values, count)
    chosen = values > limit
    chosen[true_positions(values == limit)[: count - int(torch.count_nonzero(chosen))]] = True
    return chosen


def largest_positions(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sorted int64 positions of the values that `largest_of` marks."""
    return true_positions(largest_of(values, count))


def true_positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the sorted int64 positions of the true entries of a mask of shape (n,).

    A CPU uses numpy, whose loop has no branch to mispredict: a fifth of the time of `torch.nonzero`.
    """
    if mask.device.type != "cpu":
        return torch.nonzero(mask).view(-1)
    # The memory ledger does not see numpy's allocations, so they are copied piece by piece.
    found = [torch.from_numpy(np.flatnonzero(piece.numpy())) + at * PIECE for at, piece in enumerate(mask.split(PIECE))]
    return found[0] if len(found) == 1 else torch.cat(found)


def _kth_largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count`-th largest value as a scalar, given values without NaN.

    The values are counted in bins, 16 between a number and its double, so few share the bin of the result.
    """
    keys = order_keys(values)
    counts = torch.bincount(keys, minlength=NUM_KEYS)
    key = counts.numel() - 1 - _num_bins_reaching(counts, count)
    rivals = values.index_select(0, true_positions(keys == key))
    num_above = int(counts[key + 1 :].sum())
    return torch.topk(rivals, count - num_above, sorted=False).values.min()


def order_keys(values: torch.Tensor) -> torch.Tensor:
    """Return int16 keys in [0, 2^13) in the order of some numbers, equal for nearly equal numbers."""
    bits = values.to(torch.bfloat16).view(torch.int16)
    # The bits of negative numbers run the other way.
    return (bits >> 15).bitwise_and_(_MAGNITUDE).bitwise_xor_(bits).bitwise_right_shift_(3).add_(NUM_KEYS // 2)


def _num_bins_reaching(counts: torch.Tensor, count: int) -> int:
    """Count the last bins that together hold fewer than `count`."""
    return int(torch.searchsorted(counts.flip(0).cumsum_(0), count))


def largest_entries(flat: torch.Tensor, count: int, barred: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Find the entries of largest magnitude in a dense tensor with no dense temporary.

    Counts of magnitudes rounded to bf16 give a threshold. The choice among the few that round to it is exact.

    Args:
        flat: Floating-point tensor, shape (n,), contiguous.
        count: Number of entries to find; fewer may be available beside the barred ones.
        barred: Sets of sorted int64 positions to leave out, disjoint from each other.

    Returns:
        Sorted int64 positions, shape (count,), or all that are not barred; ties go to the lower position.
    """
    num_barred = sum(positions.numel() for positions in barred)
    count = max(0, min(count, flat.numel() - num_barred))
    if count == 0:
        return torch.arange(0, device=flat.device)
    least = _least_magnitude(flat, count, barred)
    positions = _positions(flat, least, barred)
    if positions.numel() < count:
        return _filled_with_zeros(flat, positions, count, barred)
    return _without_surplus(flat, positions, least, count)


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return magnitudes rounded to bf16, as int16 of the same order, with NaN above `_INFINITE`."""
    return values.to(torch.bfloat16).view(torch.int16).bitwise_and(_MAGNITUDE)


def _least_magnitude(flat: torch.Tensor, count: int, barred: Sequence[torch.Tensor]) -> int:
    """Return the largest rounded magnitude that at least `count` entries reach which are not barred."""
    counts = torch.zeros(NUM_MAGNITUDES, dtype=torch.int32, device=flat.device)
    for piece in flat.split(PIECE):
        counts += torch.bincount(magnitudes(piece), minlength=NUM_MAGNITUDES)
    for positions in barred:
        counts -= torch.bincount(magnitudes(flat.index_select(0, positions)), minlength=NUM_MAGNITUDES)
    return min(NUM_MAGNITUDES - 1 - _num_bins_reaching(counts, count), _INFINITE)


def _positions(flat: torch.Tensor, least: int, barred: Sequence[torch.Tensor]) -> torch.Tensor:
    """Find the rounded magnitudes of at least `least`, or all nonzero values if `least` is 0, except barred ones."""
    starts = list(range(0, flat.numel(), PIECE))
    edges = torch.tensor([*starts, flat.numel()], device=flat.device)
    cuts = [torch.searchsorted(positions, edges).tolist() for positions in barred]
    found = []
    for at, start in enumerate(starts):
        piece = flat[start : start + PIECE]
        mask = magnitudes(piece) >= least if least else piece != 0
        for positions, cut in zip(barred, cuts, strict=True):
            mask.index_fill_(0, positions[cut[at] : cut[at + 1]] - start, False)
        found.append(true_positions(mask).add_(start))
    return torch.cat(found)


def _without_surplus(flat: torch.Tensor, positions: torch.Tensor, least: int, count: int) -> torch.Tensor:
    """Keep the `count` largest of the positions whose rounded magnitudes are at least `least`."""
    num_surplus = positions.numel() - count
    if num_surplus == 0:
        return positions
    values = flat.index_select(0, positions)
    rivals = true_positions(magnitudes(values).clamp_(max=_INFINITE) <= least)
    stay = torch.ones(positions.shape, dtype=torch.bool, device=flat.device)
    contested = values.index_select(0, rivals).abs_().float()
    stay.index_copy_(0, rivals, largest_of(contested, rivals.numel() - num_surplus))
    return positions.index_select(0, true_positions(stay))


def _filled_with_zeros(
    flat: torch.Tensor, nonzero: torch.Tensor, count: int, barred: Sequence[torch.Tensor]
) -> torch.Tensor:
    # These first entries hold at least count - len(nonzero) zeros that are not barred.
    is_zero = flat[: count + sum(positions.numel() for positions in barred)] == 0
    for positions in barred:
        is_zero.index_fill_(0, positions[positions < is_zero.numel()], False)
    return torch.cat([nonzero, torch.nonzero(is_zero).view(-1)[: count - nonzero.numel()]]).sort().values


def contains(sorted_indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mark the values that are among some sorted positions.

    Args:
        sorted_indices: Positions, integers, shape (n,), increasing.
        values: Integers of the same dtype, shape (m,).

    Returns:
        Mask, bool, shape (m,).
    """
    if sorted_indices.numel() == 0:
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    at = torch.searchsorted(sorted_indices, values).clamp_(max=sorted_indices.numel() - 1)
    return sorted_indices[at] == values


def largest_products(rows: torch.Tensor, columns: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the positions (i, j) of the largest r_i * c_j without their matrix (MA's growth, SFT's equation 10).

    MA's score, (r_i c_j)^(1/4), has the same order. The search sorts c and bisects a threshold, for which it counts the
    products in each row that reach it. Then it compares the columns with each row's limit, some rows at a time. It
    takes O(rows + columns + count) memory. Products of fp32 numbers are exact in fp64, so the order is exact.

    A product is zero if its row or column has met no gradient, or only zeros. Zeros come after all positive products.

    Args:
        rows: Row factors r, fp32, shape (num_rows,), not negative.
        columns: Column factors c, fp32, shape (num_columns,), not negative.
        count: Number of positions to find, at most num_rows * num_columns.

    Returns:
        Sorted int64 flat positions, shape (count,), and their products, fp64; ties go to the lower position.
    """
    r, c, ascending = _factors(rows, columns)
    num_positive = _num_positive(r) * _num_positive(c)
    if count > num_positive:
        limits = _limits_with_zeros(r, c, count - num_positive)
    else:
        low, high, are_few = _bisected(r, ascending, lambda limit, reached: reached >= count, count // 8)
        limits = (low * (1 - _SLACK) / r).expand(r.shape)
        if not are_few:
            # All products may tie early in a run: take no rows after those that together have enough.
            above = high * (1 + _SLACK) / r
            num_ties = torch.searchsorted(ascending, above) - torch.searchsorted(ascending, limits)
            limits = torch.where(num_ties.cumsum(0) - num_ties < count, limits, above)
    positions, products = _products_from(r, c, limits)
    chosen = largest_of(products, count)
    return positions[chosen], products[chosen]


def leading_products(
    rows: torch.Tensor, columns: torch.Tensor, barred: torch.Tensor, wanted: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the positions among the `count` largest products that are not barred, as far as they may be grown.

    Products whose fp32 scores are below the `wanted` largest may be left out, so the search is only as long as the
    growth needs.

    Args:
        rows: Row factors r, fp32, shape (num_rows,), not negative.
        columns: Column factors c, fp32, shape (num_columns,), not negative.
        barred: Sorted int64 flat positions, shape (n,).
        wanted: Number of positions to grow.
        count: Largest number of products to examine, those of barred positions included.

    Returns:
        Sorted int64 flat positions, at least `wanted` or all that qualify, and their products, fp64.
    """
    r, c, ascending = _factors(rows, columns)
    of_barred = _products_at(r, c, barred)

    def is_enough(limit: torch.Tensor, reached: int) -> bool:
        return reached >= count or (
            reached >= wanted and reached - int(torch.count_nonzero(of_barred >= limit)) >= wanted
        )

    limit = _bisected(r, ascending, is_enough, wanted // 8)[0] * (1 - _SCORE_SLACK)
    num_reaching = _num_reaching(r, ascending, limit)
    if num_reaching <= count and is_enough(limit, num_reaching):
        return _products_from(r, c, limit / r, barred)
    positions, products = largest_products(rows, columns, count)
    frozen = ~contains(barred, positions)
    return positions[frozen], products[frozen]


def _factors(rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the factors r and c, fp64, and c in ascending order."""
    r, c = rows.double(), columns.double()
    return r, c, c.sort().values


def _num_positive(factors: torch.Tensor) -> int:
    return int(torch.count_nonzero(factors))


def _limits_with_zeros(r: torch.Tensor, c: torch.Tensor, num_zeros: int) -> torch.Tensor:
    """Return limits of c by row that all positive products and at least `num_zeros` zeros of the first rows reach."""
    zeros_of_row = torch.where(r > 0, c.numel() - _num_positive(c), c.numel())
    is_wanted = zeros_of_row.cumsum(0) - zeros_of_row < num_zeros
    least = torch.where(c > 0, c, torch.inf).min()
    return torch.where(is_wanted, 0.0, torch.where(r > 0, least, torch.inf))


def _num_reaching(r: torch.Tensor, ascending: torch.Tensor, limit: torch.Tensor) -> int:
    """Count the products of at least a positive limit: in row i, from searchsorted(ascending, limit / r_i) on."""
    return r.numel() * ascending.numel() - int(torch.searchsorted(ascending, limit / r).sum())


def _bisected(
    r: torch.Tensor, ascending: torch.Tensor, is_enough: Callable[[torch.Tensor, int], bool], most_between: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Bisect a limit of the products.

    Args:
        r: Factors of the rows, fp64.
        ascending: Factors of the columns, fp64.
        is_enough: Predicate of a limit and the number of products that reach it: whether the limit is low enough.
        most_between: Number of products between two limits that need not be told apart.

    Returns:
        A limit that is low enough, or the smallest positive product if none is; a higher limit that is not low enough;
        and whether at most `most_between` products lie between them.
    """
    positive = r[r > 0].min() * ascending[ascending > 0][0]
    low, high = positive * (1 - _SLACK), (r.max() * ascending[-1]) * (1 + _SLACK)
    num_low, num_high = _num_positive(r) * _num_positive(ascending), 0
    for _ in range(_BISECTIONS):
        if num_low - num_high <= most_between:
            return low, high, True
        middle = low.sqrt() * high.sqrt()
        reached = _num_reaching(r, ascending, middle)
        if is_enough(middle, reached):
            low, num_low = middle, reached
        else:
            high, num_high = middle, reached
    return low, high, False


def _products_from(
    r: torch.Tensor, c: torch.Tensor, limits: torch.Tensor, barred: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted positions, except barred ones, at which c_j reaches row i's limit, and r_i * c_j there."""
    num_rows = max(1, PIECE // c.numel())
    starts = list(range(0, r.numel(), num_rows))
    edges = torch.tensor([*starts, r.numel()], device=r.device) * c.numel()
    cuts = [] if barred is None else torch.searchsorted(barred, edges).tolist()
    found = []
    for at, start in enumerate(starts):
        mask = (c >= limits[start : start + num_rows, None]).view(-1)
        if barred is not None:
            mask.index_fill_(0, barred[cuts[at] : cuts[at + 1]] - start * c.numel(), False)
        found.append(true_positions(mask).add_(start * c.numel()))
    positions = torch.cat(found)
    return positions, _products_at(r, c, positions)


def _products_at(r: torch.Tensor, c: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    row = torch.div(positions, c.numel(), rounding_mode="floor")
    return r.index_select(0, row).mul_(c.index_select(0, positions - row * c.numel()))
