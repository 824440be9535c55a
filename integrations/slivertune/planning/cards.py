"""Rates of graphics cards from their vendors (`cards.toml`), and the share of them that a run is assumed to reach."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import torch

from slivertune.core.setting_checks import check_choice
from slivertune.hift.tiled_steps import TILE_BYTES

EFFICIENCY = 0.6
"""Share of the peak that the matrix products of training reach. It is an assumption, which `--efficiency` replaces."""
BUS_EFFICIENCY = 0.8
"""Share of the bus's rate that large copies from pinned memory reach. It is an assumption."""
CACHE_RATIO = 4
"""Rate of the L2 cache over that of the memory. It is an assumption."""
LAUNCH_SECONDS = 5e-6
"""Least time of an operator on a tile. It is an assumption."""
HOST_BANDWIDTH = 40e9
"""Bytes/s that an optimizer on the host reads and writes. This assumes 80 % of 2 channels of DDR4-3200."""
DISK_BANDWIDTH = 5e9
"""Bytes/s that a disk reads and writes by default, both together. This assumes a fast NVMe disk."""


_LARGEST_SHARE = 1.1
"""Memory of a card by its vendor, over the memory that its driver reports, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates that a run is assumed to reach, each above 0."""

    flops: float
    """Floating-point operations per second."""
    efficiency: float = 1.0
    """Share of the card's peak that `flops` is."""
    memory_bandwidth: float
    """Bytes/s that the device's memory reads and writes, both together."""
    cache_bandwidth: float | None = None
    """Bytes/s of the L2 cache, if it has room for the temporaries of a tile. None if it does not."""
    bus_bandwidth: float
    """Bytes/s of the bus each way."""
    link_bandwidth: float | None = None
    """Bytes/s each way between GPUs. None if they communicate over the bus."""
    disk_bandwidth: float = DISK_BANDWIDTH
    """Bytes/s that the disk reads and writes, both together."""
    is_compiled: bool = False
    """Whether forward and backward are compiled. Operators between matrix products are then assumed to be fused and to
    cost nothing, which is a lower bound."""

    def at(self, efficiency: float) -> "Rates":
        """Return the same rates with another share of the peak.

        Args:
            efficiency: Share of the peak, in (0, 1].
        """
        return replace(self, flops=efficiency / self.efficiency * self.flops, efficiency=efficiency)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Graphics card with its vendor's figures."""

    name: str
    device_names: tuple[str, ...]
    """Names by which `torch.cuda.get_device_name` reports the card."""
    peak_flops: float
    """Dense bf16 operations per second, with sums in fp32."""
    fp32_flops: float
    """Operations per second in fp32 without TF32, which torch leaves off for matrix products."""
    memory_bandwidth: float
    """Bytes/s of the device's memory."""
    memory_bytes: int
    """Bytes of the device's memory."""
    bus_bandwidth: float
    """Bytes/s of the bus each way."""
    source: str
    """Source of the figures."""
    note: str = ""
    """Note on runs on the card, for people."""
    l2_bytes: int = 0
    """Bytes of the L2 cache, 0 if they are not listed."""
    link_bandwidth: float | None = None
    """Bytes/s each way between GPUs over NVLink. None without NVLink."""

    def rates(
        self,
        *,
        in_fp32: bool = False,
        efficiency: float = EFFICIENCY,
        disk_bandwidth: float = DISK_BANDWIDTH,
        is_compiled: bool = False,
    ) -> Rates:
        """Return the rates that a run is assumed to reach on the card.

        Args:
            in_fp32: Whether matrix products run in fp32 instead of bf16.
            efficiency: Share of the peak that matrix products reach.
            disk_bandwidth: As in `Rates`.
            is_compiled: As in `Rates`.
        """
        return Rates(
            flops=efficiency * (self.fp32_flops if in_fp32 else self.peak_flops),
            efficiency=efficiency,
            memory_bandwidth=self.memory_bandwidth,
            cache_bandwidth=CACHE_RATIO * self.memory_bandwidth if self.l2_bytes >= 4 * TILE_BYTES else None,
            bus_bandwidth=BUS_EFFICIENCY * self.bus_bandwidth,
            link_bandwidth=None if self.link_bandwidth is None else BUS_EFFICIENCY * self.link_bandwidth,
            disk_bandwidth=disk_bandwidth,
            is_compiled=is_compiled,
        )


@cache
def known_cards() -> dict[str, Card]:
    """Read the cards of `cards.toml`, by short name."""
    text = files("slivertune.planning").joinpath("cards.toml").read_text(encoding="utf-8")
    return {
        key: Card(**{**figures, "device_names": tuple(figures["device_names"])})
        for key, figures in tomllib.loads(text).items()
    }


def card_named(name: str) -> Card:
    """Return the known card of a short name.

    Raises:
        ValueError: If no known card has that name.
    """
    check_choice("gpu", name, tuple(known_cards()))
    return known_cards()[name]


def find_card(name: str | None) -> Card:
    """Find a known card by its name, or the card of this machine.

    Args:
        name: Short name of the card; None for torch's default CUDA device.

    Raises:
        ValueError: If no known card has that name, or if this machine has no known card.
    """
    if name is not None:
        return card_named(name)
    choices = f"Name one by --gpu ({', '.join(known_cards())})"
    if not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here whose rates could be used. {choices}")
    found = card_here()
    if found is None:
        raise ValueError(f"the rates of {torch.cuda.get_device_name()} are not known. {choices}")
    return found


def card_here() -> Card | None:
    """Return the card of torch's default CUDA device, or None without such a device or if its card is not known."""
    if not torch.cuda.is_available():
        return None
    present, has_bytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    return next(
        (
            card
            for card in known_cards().values()
            # Some are sold with half the memory under the same name.
            if present in card.device_names and card.memory_bytes <= _LARGEST_SHARE * has_bytes
        ),
        None,
    )
