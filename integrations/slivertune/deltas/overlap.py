"""The sum of several deltas of one tensor, and how many weights they share. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slivertune.deltas.delta import SparseDelta


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many weights deltas touch, and how many of them two or more do."""

    num_touched: int
    num_shared: int

    @property
    def share(self) -> float:
        """Shared weights as a part of those touched, in [0, 1]."""
        return self.num_shared / self.num_touched if self.num_touched else 0.0


def total_overlap(overlaps: Iterable[Overlap]) -> Overlap:
    """Sum the counts of several tensors."""
    counts = list(overlaps)
    return Overlap(sum(each.num_touched for each in counts), sum(each.num_shared for each in counts))


def sum_deltas(deltas: Sequence[SparseDelta]) -> tuple[SparseDelta, Overlap]:
    """Sum deltas of one tensor in fp32, in their order.

    Args:
        deltas: At least one; of one shape.

    Returns:
        The sum on the CPU, at the union of the positions, and the overlap.

    Raises:
        ValueError: If the shapes differ.
    """
    shapes = {delta.shape for delta in deltas}
    if len(shapes) != 1:
        raise ValueError(f"deltas of one tensor must have one shape, not {sorted(shapes)}; they are of other models")
    first = deltas[0]
    if len(deltas) == 1:
        return SparseDelta(first.indices.cpu(), first.values.cpu(), first.shape), Overlap(first.num_weights, 0)
    indices, counts = torch.unique(torch.cat([delta.indices.cpu() for delta in deltas]), return_counts=True)
    total = torch.zeros(len(indices))
    for delta in deltas:
        # One delta touches a position once, so that the order of additions is that of the deltas.
        total[torch.searchsorted(indices, delta.indices.cpu())] += delta.values.cpu()
    return SparseDelta(indices, total, first.shape), Overlap(len(indices), int((counts > 1).sum()))
