"""The largest of many entries, in memory and time that do not depend on values (SFT, section 3.2). Pure.

Every choice is a total order (larger first, ties to the lower position), so it does not depend on the cutting of a
tensor, on the device or on the rank. No size follows from a value, so a GPU never waits, and a memory plan runs the
same code on tensors without data. A choice of more entries than there are is filled up with `NONE`.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from slivertune.core.sized import sized
from slivertune.core.torch_internals import is_without_data

PIECE = 2**20
"""Number of elements examined together, which bounds the temporaries of a search in a dense tensor."""
NONE = -1
"""Position in place of an entry that is not there."""
_UPPER, _LOWER = 2**15, 2**16
"""Numbers of values of a key's upper half, whose sign is not used, and of its lower half."""
_INFINITE = 0x7F800000
"""Bits of an infinite fp32."""
_INFINITE_FP64 = 0x7FF0000000000000
"""Bits of an infinite fp64."""
_UNUSED_BITS = 5
"""Last bits of an fp64 that are zero in each product of two fp32 numbers, which has 48 significant bits."""
_DIGIT = 4
"""Bits of a product's limit that are found together."""
Keys = Callable[[slice | torch.Tensor], torch.Tensor]
"""Function that returns some of the entries as numbers in the same order, int16 or int32, not negative."""


@sized
def largest_of(
    values: torch.Tensor,
    count: int | torch.Tensor,
    among: torch.Tensor | None = None,
    smallest: bool = False,
) -> torch.Tensor:
    """Mark the `count` values of largest magnitude. Ties go to the lower position, and NaN is as large as infinity.

    Args:
        values: Floating-point values, compared in fp32, shape (n,).
        count: Number of values to mark, or an int64 scalar on the device; all are marked if there are fewer.
        among: Mask of the values that may be marked, bool, shape (n,); all without it.
        smallest: Whether to mark those of smallest magnitude, NaN before all.

    Returns:
        Mask, bool, shape (n,).
    """

    def keys(part: slice | torch.Tensor) -> torch.Tensor:
        found = _magnitudes(values[part].float())
        return found.neg_().add_(_INFINITE).masked_fill_(values[part].isnan(), _INFINITE + 1) if smallest else found

    mask = torch.ones(values.shape, dtype=torch.bool, device=values.device) if among is None else among.clone()
    return _keep_largest(mask, keys, count)


def largest_positions(values: torch.Tensor, count: int, among: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sorted int64 positions of the values that `largest_of` marks, shape (count,), then `NONE`."""
    return positions_of(largest_of(values, count, among), count)


def positions_of(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sorted int64 positions of the first `count` true entries of a mask, shape (count,), then `NONE`."""
    if not _is_on_host(mask):
        return torch.nonzero_static(mask, size=count, fill_value=NONE).view(-1)
    found = _true_positions(mask)[:count]
    return torch.cat([found, found.new_full((count - found.numel(),), NONE)])


def _true_positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions of the true entries of a mask on the host.

    numpy's loop has no branch to mispredict: a fifth of the time of `torch.nonzero`.
    """
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def entries_at(values: torch.Tensor, positions: torch.Tensor, missing: float) -> torch.Tensor:
    """Return the values at some positions.

    Args:
        values: Values, shape (n,).
        positions: Positions, int32 or int64, shape (m,).
        missing: Value for `NONE`.
    """
    return values.index_select(0, positions.clamp(min=0)).masked_fill_(positions == NONE, missing)


def within(positions: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return positions relative to the beginning of a range, int64, and `length` for those outside of it."""
    found = positions - start
    return found.masked_fill_((found < 0) | (found >= length), length).long()


@sized
def largest_entries(flat: torch.Tensor, count: int, taken: Iterable[torch.Tensor] = (), start: int = 0) -> torch.Tensor:
    """Find the entries of largest magnitude in a part of a dense tensor, beside one byte for each of its elements.

    Args:
        flat: The part, of any floating dtype, shape (n,), contiguous. NaN is as large as infinity.
        count: Number of entries to find.
        taken: Sets of positions in the whole tensor that are left out, int32.
        start: Position of the part's first element in the whole tensor.

    Returns:
        Sorted int64 positions in the part, shape (min(count, n),), then `NONE`; ties go to the lower position.
    """
    num_elements = flat.numel()
    mask = torch.ones(num_elements + 1, dtype=torch.bool, device=flat.device)
    for positions in taken:
        mask.index_fill_(0, within(positions, start, num_elements), False)

    mask = _keep_largest(mask[:-1], lambda part: _magnitudes(flat[part]), count)
    return positions_of(mask, min(count, num_elements))


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return numbers in the order of the magnitudes, not negative: int16 for bf16, int32 for others."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).bitwise_and(0x7FFF).clamp_(max=_INFINITE >> 16)
    return values.float().view(torch.int32).bitwise_and(0x7FFFFFFF).clamp_(max=_INFINITE)


def _keep_largest(mask: torch.Tensor, keys: Keys, count: int | torch.Tensor) -> torch.Tensor:
    """Clear all but the `count` largest of the marked entries, in place."""
    if _is_on_host(mask):
        return _keep_largest_on_host(mask, keys, int(count))
    if isinstance(count, int):
        count = torch.full((), count, dtype=torch.int64, device=mask.device)

    def upper_half(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return _upper_half(keys(part)), mask[part]

    first, num_above = _last_bin(_counted(mask, _UPPER, upper_half), count)
    if keys(slice(0)).dtype == torch.int16:
        return _keep_from(mask, lambda part: _compared(keys(part), first), count - num_above)

    def lower_half(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        here = keys(part)
        return here & (_LOWER - 1), mask[part] & (here >> 16 == first)

    second, num_between = _last_bin(_counted(mask, _LOWER, lower_half), count - num_above)
    return _keep_from(
        mask, lambda part: _compared(keys(part), first * _LOWER + second), count - num_above - num_between
    )


def _is_on_host(mask: torch.Tensor) -> bool:
    """Return whether sizes may depend on values, since nothing has to wait for them."""
    return mask.device.type == "cpu" and not is_without_data()


def _keep_largest_on_host(mask: torch.Tensor, keys: Keys, count: int) -> torch.Tensor:
    """Make the same choice in a third of the time: the last bin has few entries, which are compared alone."""
    counts = torch.zeros(_UPPER, dtype=torch.int64, device=mask.device)
    for part in _pieces(mask.shape[0]):
        counts += torch.bincount(_upper_half(keys(part)), minlength=_UPPER)
        unmarked = _true_positions(~mask[part]).add_(part.start)
        counts -= torch.bincount(_upper_half(keys(unmarked)), minlength=_UPPER)
    last, num_above = map(int, _last_bin(counts, torch.full((), count, dtype=torch.int64, device=mask.device)))
    found = []
    for part in _pieces(mask.shape[0]):
        upper = _upper_half(keys(part))
        found.append(_true_positions(mask[part] & (upper == last)) + part.start)
        mask[part] &= upper >= last
    rivals = torch.cat(found) if found else torch.arange(0, device=mask.device)
    order = keys(rivals).sort(descending=True, stable=True).indices
    mask[rivals[order[max(0, count - num_above) :]]] = False
    return mask


def _upper_half(keys: torch.Tensor) -> torch.Tensor:
    return keys if keys.dtype == torch.int16 else keys >> 16


def _compared(keys: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys > limit, keys == limit


def _counted(
    mask: torch.Tensor, num_bins: int, part_of: Callable[[slice], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Count numbers, of which `part_of` returns a range and marks of those that count, along a mask."""
    counts = torch.zeros(num_bins, dtype=torch.int32, device=mask.device)
    for part in _pieces(mask.shape[0]):
        numbers, marks = part_of(part)
        numbers = numbers.long()
        counts.scatter_add_(0, numbers, marks.int())
    return counts


def _last_bin(counts: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last bin from which on there are `count` entries, and the number of those above it."""
    totals = counts.flip(0).cumsum(0, dtype=torch.int64)
    place = torch.searchsorted(totals, count).clamp_(max=counts.numel() - 1)
    last = counts.numel() - 1 - place
    return last, totals.take(place) - counts.take(last)


def _keep_from(
    mask: torch.Tensor,
    compared: Callable[[slice], tuple[torch.Tensor, torch.Tensor]],
    num_ties: torch.Tensor,
    piece: int = PIECE,
) -> torch.Tensor:
    """Clear all marks but those above a limit and the first `num_ties` at it, in place.

    Args:
        mask: Marks, bool, shape (n,).
        compared: Function that returns for a range of the entries whether they are above the limit, and at it.
        num_ties: int64 scalar.
        piece: Number of entries in a range.
    """
    num_seen = torch.zeros((), dtype=torch.int64, device=mask.device)
    for part in _pieces(mask.shape[0], piece):
        marks = mask[part]
        is_above, is_at = compared(part)
        number = is_at.logical_and_(marks).cumsum(0, dtype=torch.int32)
        marks &= is_above.logical_or_(is_at & (number <= num_ties - num_seen))
        num_seen = num_seen + number[-1]
    return mask


def _pieces(num_elements: int, piece: int = PIECE) -> Iterator[slice]:
    for first in range(0, num_elements, piece):
        yield slice(first, min(first + piece, num_elements))


@sized
def largest_products(rows: torch.Tensor, columns: torch.Tensor, count: int) -> torch.Tensor:
    """Find the positions (i, j) of the largest r_i * c_j without their matrix (MA's growth, SFT's equation 10).

    Products of fp32 numbers are exact in fp64, and so is each comparison of c_j with a limit over r_i, as long as the
    limit has no more significant bits than a product: fp64 rounds the quotient, but not over a number of 24 bits. So
    the bits of the last product's size are found one digit after the other, from the numbers of products that reach it.

    Args:
        rows: Row factors r, fp32, shape (num_rows,), not negative. Infinity and NaN count as the largest fp32.
        columns: Column factors c, fp32, shape (num_columns,), likewise.
        count: Number of positions to find, at least 1 and at most num_rows * num_columns.

    Returns:
        Sorted int64 flat positions, shape (count,); ties go to the lower position.
    """
    r, c = _factors(rows), _factors(columns)
    ascending = c.sort().values

    def num_reaching(limits: torch.Tensor) -> torch.Tensor:
        """Count the products of at least each of some positive limits."""
        firsts = torch.searchsorted(ascending, limits[:, None] / r)
        return (ascending.numel() - firsts).sum(1)

    digits = torch.arange(1, 2**_DIGIT, dtype=torch.int64, device=r.device)
    found = torch.zeros(1, dtype=torch.int64, device=r.device)
    for shift in range(64 - _UNUSED_BITS - _DIGIT + 1, -1, -_DIGIT):
        limits = _limit_of(found + (digits << shift))
        found += (num_reaching(limits) >= count).sum() << shift
    above = _limit_of(found + 1)
    num_ties = count - num_reaching(above)
    # Zeros reach no limit but zero, which all products reach.
    at_least = torch.where(found > 0, _limit_of(found) / r, 0.0)
    more_than = above / r
    width = c.numel()
    # On the host it is known whether there are ties to choose from; else each product is compared once.
    has_ties = not _is_on_host(r) or int(num_reaching(_limit_of(found))) > count or int(found) == 0

    def compared(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = slice(part.start // width, part.stop // width)
        is_above = c >= more_than[some, None]
        return is_above.view(-1), (c >= at_least[some, None]).logical_and_(~is_above).view(-1)

    if not has_ties:
        return positions_of(torch.ge(c, at_least[:, None]).view(-1), count)
    piece = max(1, PIECE // width) * width
    mask = torch.ones(r.numel() * width, dtype=torch.bool, device=r.device)
    return positions_of(_keep_from(mask, compared, num_ties, piece), count)


def _factors(values: torch.Tensor) -> torch.Tensor:
    """Return the factors of products in fp64, all of them finite."""
    most = torch.finfo(torch.float32).max
    return values.double().nan_to_num_(nan=most, posinf=most)


def _limit_of(number: torch.Tensor) -> torch.Tensor:
    """Return positive fp64 numbers by their bits without the unused ones, at most infinity.

    No product of two positive fp32 numbers is below the least of them, so that none is a subnormal of fp64.
    """
    bits = number.clamp(max=_INFINITE_FP64 >> _UNUSED_BITS) << _UNUSED_BITS
    return bits.view(torch.float64).clamp_(min=2.0**-300)


@sized
def product_scores(rows: torch.Tensor, columns: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute MA's scores (r_i c_j)^(1/4) at some flat positions, fp32 (SFT, equation 10).

    Args:
        rows: Row factors r, fp32, shape (num_rows,).
        columns: Column factors c, fp32, shape (num_columns,).
        positions: Flat positions, int64, shape (n,).
    """
    r, c = _factors(rows), _factors(columns)
    scores = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    for part in _pieces(positions.numel()):
        row = torch.div(positions[part], columns.numel(), rounding_mode="floor")
        column = positions[part] - row * columns.numel()
        products = r.index_select(0, row) * c.index_select(0, column)
        scores[part] = products.sqrt_().sqrt_()  # which have the same bits everywhere, as powers have not
    return scores
