"""Half-size storage of an active weight: 16-bit positions, and bf16 values that are rounded at random."""

import zlib

import torch

TILE = 2**16
"""Elements of the flattened tensor whose positions share their high bits."""


class Positions:
    """Sorted int32 positions of a tensor, 4 bytes each."""

    def __init__(self, indices: torch.Tensor) -> None:
        self._indices = indices

    def get(self) -> torch.Tensor:
        """The positions: int32, shape (n,), sorted."""
        return self._indices

    def set(self, indices: torch.Tensor) -> None:
        """Hold other positions."""
        self._indices = indices

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is stored."""
        return (self._indices,)


class PackedPositions(Positions):
    """The same in 2 bytes each: the position in its tile, and how many positions every tile has.

    Args:
        indices: int32, sorted, shape (n,).
        num_elements: Elements of the tensor.
    """

    def __init__(self, indices: torch.Tensor, num_elements: int) -> None:
        self._num_tiles = -(-num_elements // TILE)
        self.set(indices)

    def get(self) -> torch.Tensor:
        """The positions, unpacked: int32, shape (n,), sorted."""
        tiles = torch.arange(self._num_tiles, dtype=torch.int32, device=self._low.device)
        return (self._low.int() & (TILE - 1)) + torch.repeat_interleave(tiles, self._counts) * TILE

    def set(self, indices: torch.Tensor) -> None:
        """Hold other positions."""
        # Beyond 2^15 the int16 is negative; `get` masks the sign away.
        self._low = indices.to(torch.int16)
        self._counts = torch.bincount(indices // TILE, minlength=self._num_tiles).int()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is stored."""
        return self._low, self._counts


def rounding_generator(seed: int, name: str, updates: int, device: torch.device) -> torch.Generator:
    """Randomness for one tensor's update: the same on every rank, and after a resume."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {updates}".encode()))


def rounded_at_random(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round to bf16, up or down with the probability that makes the expectation exact.

    An update far below a value's last place moves it now and then, where rounding to nearest never would.

    Args:
        values: fp32; infinite ones and NaN stay what they are.
        generator: Source of randomness, on the values' device.

    Returns:
        bf16, of the same shape.
    """
    noise = torch.randint(TILE, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = (values.view(torch.int32) + noise) & -TILE
    rounded = torch.where(values.isfinite(), bits.view(torch.float32), values)
    return rounded.to(torch.bfloat16)
