"""A sparse difference of one weight from its pretrained value: sorted flat positions and fp32 values."""

import math
from dataclasses import dataclass

import torch

INDEX_LIMIT = 2**31
"""Elements of the largest tensor whose flat positions fit in int32."""


@dataclass(frozen=True)
class SparseDelta:
    """What is added to one tensor (phi at the positions eta; SFT, equations 3 to 6).

    Raises:
        ValueError: If positions and values do not belong together, or the positions are not those of such a tensor.
    """

    indices: torch.Tensor
    """int32, shape (n,): positions in the flattened tensor, strictly increasing."""
    values: torch.Tensor
    """float32, shape (n,): what is added there; zero where nothing was learnt yet."""
    shape: tuple[int, ...]
    """Extents of the dense tensor."""

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int32 or self.values.dtype != torch.float32:
            raise ValueError(
                f"a delta has int32 indices and float32 values, not {self.indices.dtype} and {self.values.dtype}"
            )
        if self.indices.ndim != 1 or self.indices.shape != self.values.shape:
            raise ValueError(
                f"a delta has as many values as indices, in one dimension; these are of shapes "
                f"{tuple(self.values.shape)} and {tuple(self.indices.shape)}"
            )
        check_positions(self.indices, math.prod(self.shape))

    @property
    def num_weights(self) -> int:
        """Positions that the delta covers."""
        return self.indices.numel()


def check_positions(indices: torch.Tensor, num_elements: int) -> None:
    """Check that flat positions are sorted, unique and inside a tensor.

    Args:
        indices: Integer positions, shape (n,).
        num_elements: Elements of the tensor.

    Raises:
        ValueError: Naming the first rule that is broken.
    """
    if num_elements >= INDEX_LIMIT:
        raise ValueError(f"a tensor of {num_elements} elements has positions beyond int32; at most {INDEX_LIMIT - 1}")
    if indices.numel() == 0:
        return
    if bool((indices[1:] <= indices[:-1]).any()):
        raise ValueError("indices must be strictly increasing: sorted, none twice; the delta is damaged")
    lowest, highest = int(indices[0]), int(indices[-1])
    if lowest < 0 or highest >= num_elements:
        raise ValueError(
            f"indices reach from {lowest} to {highest}, the tensor has positions 0 to {num_elements - 1}; "
            "the delta is damaged or of another model"
        )


def apply_delta(weight: torch.Tensor, base: torch.Tensor, delta: SparseDelta) -> None:
    """Set the delta's positions of a weight to base + value, added in fp32 and rounded once.

    Args:
        weight: The tensor to change, contiguous or not, any floating dtype.
        base: The pretrained values at the delta's positions, shape (n,), in the weight's dtype.
        delta: What to add.
    """
    write_flat(weight, delta.indices, (base.float() + delta.values).to(weight.dtype))


def read_flat(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy the entries of a tensor at flat positions (row-major, whatever the strides)."""
    return tensor.detach().take(indices.long())


def write_flat(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Set the entries of a tensor at flat positions (row-major, whatever the strides), in place."""
    with torch.no_grad():
        tensor.detach().put_(indices.long(), values)
