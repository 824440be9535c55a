"""Stochastic rounding of fp32 values to bf16 weights, which then need no fp32 masters (arXiv 2502.20566).

A value between two neighbours in bf16 becomes the upper one with the probability of its distance from the lower one, so
that many small updates add up. The random bits of an element are a hash of the seed, the update, the weight's name and
the element's index in the whole weight: chunks, their order, shards and ranks do not change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch

from slivertune.core.repeated_work import standing_for
from slivertune.hift.config import HiFTConfig

TILE_ELEMENTS = 2**22
"""Elements rounded at once."""

BYTES_PER_ELEMENT = 13
"""Bytes of temporaries per element of a tile, at their peak."""

_LARGEST = torch.finfo(torch.bfloat16).max
_BITS_OF_LARGEST = 0x7F7F0000
"""The largest finite number of bf16, as the bits of fp32. A compiler takes an integer as a constant."""
# A round of multiplication, shift and multiplication, of which the upper half is used.
_SPREAD, _MIX = 0x9E3779B1, 0x735A2D97


@dataclass(frozen=True, kw_only=True, slots=True)
class StochasticRounding:
    """Rounding of one update."""

    seed: int
    """Seed of the random bits. It must be equal on all ranks."""
    update: int
    """Updates before this one."""

    def of(self, name: str) -> WeightRounding:
        """Return the rounding of a weight.

        Args:
            name: Name of the weight.
        """
        digest = blake2b(f"{self.seed} {self.update} {name}".encode(), digest_size=4).digest()
        return WeightRounding(int.from_bytes(digest, "little"))


def rounding_of(config: HiFTConfig, update: int) -> StochasticRounding | None:
    """Return the rounding of an update, None if weights are not rounded stochastically.

    Args:
        config: HiFT's settings.
        update: Updates before this one.
    """
    return StochasticRounding(seed=config.seed, update=update) if config.master == "stochastic" else None


class WeightRounding:
    """Rounding of one weight in one update.

    Args:
        key: Number below 2^32 that selects the hash.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._products: torch.Tensor | None = None
        """Products of the indices from 0 on, which all tiles share."""

    def offset(self, start: int) -> int:
        """Return the number that is added to the product of an index, as int32.

        Args:
            start: Index in the flattened whole weight from which indices count.
        """
        return _signed(start * _SPREAD + self._key)

    def round_into(self, target: torch.Tensor, source: torch.Tensor, start: int) -> None:
        """Round values and write them. Values that bf16 can hold stay, and nothing finite becomes infinite.

        Args:
            target: Part of the weight in bf16; any shape.
            source: Values in fp32, of the same shape. They are overwritten.
            start: Index of the part's first element in the flattened whole weight.
        """
        rounded = target if target.is_contiguous() else target.new_empty(target.shape)
        values = source.contiguous().view(-1)
        for part, tile in zip(rounded.view(-1).split(TILE_ELEMENTS), values.split(TILE_ELEMENTS), strict=True):
            bits = self._random_bits(start, tile)
            # NaN, too, is not below: infinity and NaN stay, and the largest value does not become infinite.
            tile.view(torch.int32).addcmul_(bits, tile.abs() < _LARGEST)
            part.view(torch.int16).copy_(tile.view(torch.int16)[1::2])  # the upper half is the bf16 number
            start += tile.numel()
        if rounded is not target:
            target.copy_(rounded)

    def _random_bits(self, start: int, tile: torch.Tensor) -> torch.Tensor:
        """Return hashes of the indices of a tile: numbers from 0 to 65,535 as int32."""
        if self._products is None or self._products.numel() < tile.numel():
            with standing_for(1):
                products = torch.arange(tile.numel(), dtype=torch.int32, device=tile.device)
                self._products = products.mul_(_signed(_SPREAD))
        bits = self._products[: tile.numel()] + self.offset(start)
        bits.bitwise_xor_(bits >> 16)  # this shift repeats the sign
        bits.mul_(_signed(_MIX))
        return bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def rounded(values: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Round fp32 values as `WeightRounding.round_into` does, by operators that torch compiles into one kernel.

    Args:
        values: Contiguous values in fp32.
        offset: `WeightRounding.offset` of the first value, int32 without dimensions.

    Returns:
        The values in bf16.
    """
    indices = torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)
    bits = indices * _signed(_SPREAD) + offset
    bits = (bits ^ (bits >> 16)) * _signed(_MIX)
    bits = (bits >> 16) & 0xFFFF
    whole = values.view(torch.int32)
    moved = torch.where((whole & 0x7FFFFFFF) < _BITS_OF_LARGEST, whole + bits, whole)
    return (moved >> 16).to(torch.int16).view(torch.bfloat16)


def _signed(number: int) -> int:
    """Return the int32 with the same lower 32 bits."""
    return (number + 2**31) % 2**32 - 2**31
