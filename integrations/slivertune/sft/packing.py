"""Storage of an active weight in half the bytes: 16-bit positions, and bf16 values with stochastic rounding."""

import zlib

import torch

TILE = 2**16
"""Number of elements of the flattened tensor whose positions share their high bits."""


class Positions:
    """Sorted positions of a tensor: 4 bytes per position, or 2 if packed.

    Packed storage holds each position within its tile, and the number of positions per tile.

    Args:
        indices: Positions, int32, sorted, shape (n,).
        num_elements: Number of elements of the tensor.
        packed: Whether to use half the bytes.
    """

    tensors: tuple[torch.Tensor, ...]
    """Stored tensors."""

    def __init__(self, indices: torch.Tensor, num_elements: int, *, packed: bool) -> None:
        self._num_tiles = -(-num_elements // TILE)
        self._packed = packed
        self.set(indices)

    def get(self) -> torch.Tensor:
        """Return the unpacked positions, int32, shape (n,), sorted."""
        if not self._packed:
            return self.tensors[0]
        low, counts = self.tensors
        tiles = torch.arange(self._num_tiles, dtype=torch.int32, device=low.device)
        return (low.int() & (TILE - 1)) + torch.repeat_interleave(tiles, counts, output_size=low.numel()) * TILE

    def set(self, indices: torch.Tensor) -> None:
        """Store other positions."""
        self._cuts: tuple[tuple[int, ...], list[int]] | None = None
        self.tensors = (indices,)
        if self._packed:
            # No size depends on a value, so a GPU need not be synchronised.
            starts = torch.arange(1, self._num_tiles, dtype=torch.int32, device=indices.device) * TILE
            ends = torch.searchsorted(indices.contiguous(), starts, out_int32=True)
            counts = torch.cat([ends, ends.new_full((1,), indices.numel())])
            counts[1:] -= ends
            # Beyond 2^15 the int16 is negative; `get` masks the sign away.
            self.tensors = (indices.to(torch.int16), counts)

    def cuts(self, edges: tuple[int, ...]) -> list[int]:
        """Count the positions below each edge. A GPU is waited for once after the positions were set."""
        if self._cuts is None or self._cuts[0] != edges:
            positions = self.get()
            limits = torch.tensor(edges, dtype=positions.dtype, device=positions.device)
            self._cuts = edges, torch.searchsorted(positions, limits).tolist()
        return self._cuts[1]


def rounding_generator(seed: int, name: str, updates: int, device: torch.device) -> torch.Generator:
    """Make the generator for one tensor's update, the same on every rank and after a resume."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {updates}".encode()))


def rounded_at_random(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round to bf16, up or down with the probability that makes the expectation exact (stochastic rounding).

    An update far below a value's last place then changes it now and then. Rounding to nearest never would.

    Args:
        values: Values in fp32; infinite ones and NaN stay the same.
        generator: Source of randomness, on the values' device.

    Returns:
        bf16, of the same shape.
    """
    noise = torch.randint(TILE, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = (values.view(torch.int32) + noise) & -TILE
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)
