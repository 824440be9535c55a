"""Sparse differences of a weight from its pretrained value (sorted flat positions and fp32 values), and their sums."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

INDEX_LIMIT = 2**31
"""Limit on a tensor's number of elements, below which all flat positions fit in int32."""


@dataclass(frozen=True)
class SparseDelta:
    """Sparse change of one tensor: phi at the positions eta (SFT, equations 3 to 6).

    Raises:
        ValueError: If positions and values do not fit together, or positions do not fit the tensor.
    """

    indices: torch.Tensor
    """int32, shape (n,): positions in the flattened tensor, strictly increasing."""
    values: torch.Tensor
    """float32, shape (n,): values to add there. They are zero if nothing was learnt yet."""
    shape: tuple[int, ...]
    """Extents of the dense tensor."""

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int32 or self.values.dtype != torch.float32:
            raise ValueError(
                f"a delta has int32 indices and float32 values, not {self.indices.dtype} and {self.values.dtype}. "
                "Convert them first"
            )
        if self.indices.ndim != 1 or self.indices.shape != self.values.shape:
            raise ValueError(
                f"a delta has as many values as indices, in one dimension, not shapes {tuple(self.values.shape)} and "
                f"{tuple(self.indices.shape)}. Flatten both, and pass one value per index"
            )
        check_positions(self.indices, math.prod(self.shape))

    @property
    def num_weights(self) -> int:
        """Number of positions that the delta covers."""
        return self.indices.numel()


def check_positions(indices: torch.Tensor, num_elements: int) -> None:
    """Check that flat positions are sorted, unique and inside a tensor.

    Args:
        indices: Integer positions, shape (n,).
        num_elements: Number of elements of the tensor.

    Raises:
        ValueError: If a rule is broken; names the first one.
    """
    if num_elements >= INDEX_LIMIT:
        raise ValueError(
            f"a tensor of {num_elements} elements exceeds the {INDEX_LIMIT - 1} that int32 positions reach. Leave it "
            "out"
        )
    if indices.numel() == 0:
        return
    if bool((indices[1:] <= indices[:-1]).any()):
        raise ValueError(
            "indices must be strictly increasing (sorted, none twice): the delta is damaged. Use another copy of it"
        )
    lowest, highest = int(indices[0]), int(indices[-1])
    if lowest < 0 or highest >= num_elements:
        raise ValueError(
            f"indices reach from {lowest} to {highest}, and the tensor has positions 0 to {num_elements - 1}: "
            "the delta is damaged or of another model. Use that of this model"
        )


def read_flat(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy the entries of a tensor at flat positions (row-major, whatever the strides)."""
    return tensor.detach().take(indices.long())


def write_flat(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Set the entries of a tensor at flat positions (row-major, whatever the strides), in place."""
    flat, positions = tensor.detach(), indices.long()
    # `put_` has no deterministic form, even if no position repeats.
    with torch.no_grad():
        if flat.is_contiguous():
            flat.view(-1).index_copy_(0, positions, values)
        else:
            flat[torch.unravel_index(positions, flat.shape)] = values


def rounded_sum(values: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return values + delta in the dtype of the values, added in fp32 and rounded once. A delta of zero changes no bit.

    Adding zero would turn -0.0 into 0.0.
    """
    return torch.where(delta == 0, values, (values.float() + delta).to(values.dtype))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Number of weights that deltas touch, and of those that two or more touch."""

    num_touched: int
    num_shared: int

    @property
    def share(self) -> float:
        """Shared weights as a fraction of the touched ones, in [0, 1]."""
        return self.num_shared / self.num_touched if self.num_touched else 0.0


def total_overlap(overlaps: Iterable[Overlap]) -> Overlap:
    """Sum the counts of several tensors."""
    counts = list(overlaps)
    return Overlap(sum(each.num_touched for each in counts), sum(each.num_shared for each in counts))


def sum_deltas(deltas: Sequence[SparseDelta]) -> tuple[SparseDelta, Overlap]:
    """Sum deltas of one tensor in fp32, in their order.

    Args:
        deltas: At least one delta; all of one shape.

    Returns:
        The sum on the CPU, at the union of the positions, and the overlap.

    Raises:
        ValueError: If the shapes differ.
    """
    shapes = {delta.shape for delta in deltas}
    if len(shapes) != 1:
        raise ValueError(
            f"deltas of one tensor must have one shape, not {sorted(shapes)}: they are of other models. Add deltas of "
            "one model"
        )
    first = deltas[0]
    if len(deltas) == 1:
        return SparseDelta(first.indices.cpu(), first.values.cpu(), first.shape), Overlap(first.num_weights, 0)
    indices, counts = torch.unique(torch.cat([delta.indices.cpu() for delta in deltas]), return_counts=True)
    total = torch.zeros(len(indices), dtype=torch.float32, device="cpu")
    for delta in deltas:
        # No position repeats within a delta, so the order of additions is that of the deltas.
        total[torch.searchsorted(indices, delta.indices.cpu())] += delta.values.cpu()
    return SparseDelta(indices, total, first.shape), Overlap(len(indices), int((counts > 1).sum()))
