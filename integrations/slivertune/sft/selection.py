"""Selection of trained weights: the numbers of the tensors, and the first random choice (SFT, section 3.2). Pure."""

import zlib
from collections.abc import Sequence

import torch


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
