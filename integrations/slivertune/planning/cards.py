"""The rates of graphics cards, as their vendors give them (`cards.toml`), and what of these a run is taken to reach."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

import torch

from slivertune.core.setting_checks import check_choice

Duplex = Literal["full", "half"]
"""Whether the bus has its rate each way, or once for both ways together."""

EFFICIENCY = 0.6
"""Share of the peak that the matrix products of training reach; an assumption, to be set."""
BUS_EFFICIENCY = 0.8
"""Share of the bus's rate that large copies from pinned memory reach; an assumption, to be set."""
HOST_BANDWIDTH = 40e9
"""Bytes a second that an optimizer on the host reads and writes, where nothing else is said; an assumption: 80 % of two
channels of DDR4-3200."""
DISK_BANDWIDTH = 5e9
"""Bytes a second that a disk reads or writes, where nothing else is said; an assumption: a fast NVMe disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a run is taken to reach.

    Raises:
        ValueError: If a value is outside what its field says.
    """

    flops: float
    """Floating-point operations a second."""
    efficiency: float = 1.0
    """Share of the peak that `flops` are."""
    memory_bandwidth: float
    """Bytes a second that the device's memory gives or takes."""
    bus_bandwidth: float
    """Bytes a second each way, or with half duplex of both ways together."""
    duplex: Duplex = "full"
    """What the ways share."""
    host_bandwidth: float | None = None
    """Bytes a second that the host's memory gives and takes, of both ways together; None where it bounds nothing."""
    link_bandwidth: float | None = None
    """Bytes a second each way between GPUs; None where they speak over the bus."""
    disk_bandwidth: float = DISK_BANDWIDTH
    """Bytes a second that the disk reads or writes."""
    disk_duplex: Duplex = "half"
    """Whether the disk has its rate for reading and for writing, or once for both together, as NVMe drives have."""
    is_compiled: bool = False
    """Whether forward and backward are compiled: what only passes over memory between matrix products is then taken to
    be fused into these, and to cost nothing, which is the least that it can."""

    def __post_init__(self) -> None:
        for name in (
            "flops",
            "efficiency",
            "memory_bandwidth",
            "bus_bandwidth",
            "host_bandwidth",
            "link_bandwidth",
            "disk_bandwidth",
        ):
            value = getattr(self, name)
            if not (value is None and name in ("host_bandwidth", "link_bandwidth")) and not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0; give the card's rate a second")
        for name in ("duplex", "disk_duplex"):
            check_choice(name, getattr(self, name), get_args(Duplex))

    def at(self, efficiency: float) -> "Rates":
        """The same, with another share of the peak.

        Args:
            efficiency: The share.
        """
        return replace(self, flops=efficiency / self.efficiency * self.flops, efficiency=efficiency)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A graphics card by its vendor's figures."""

    name: str
    device_names: tuple[str, ...]
    """As torch has them from the driver."""
    peak_flops: float
    """Dense bf16 operations a second with sums in fp32."""
    fp32_flops: float
    """fp32 operations a second, without TF32, which torch leaves off for matrix products."""
    memory_bandwidth: float
    """Bytes a second."""
    memory_bytes: int
    """Of the device."""
    bus_bandwidth: float
    """Bytes a second each way."""
    source: str
    """Where the figures are from."""
    link_bandwidth: float | None = None
    """Bytes a second each way between GPUs, by NVLink; None without."""

    def rates(
        self,
        *,
        in_fp32: bool = False,
        efficiency: float = EFFICIENCY,
        bus_bandwidth: float | None = None,
        duplex: Duplex = "full",
        host_bandwidth: float | None = None,
        disk_bandwidth: float = DISK_BANDWIDTH,
        disk_duplex: Duplex = "half",
        is_compiled: bool = False,
    ) -> Rates:
        """What a run is taken to reach on the card.

        Args:
            in_fp32: Whether matrix products are fp32 ones, and not bf16.
            efficiency: Share of the peak.
            bus_bandwidth: Bytes a second each way; None for `BUS_EFFICIENCY` of the bus's rate.
            duplex: Whether the bus has its rate each way.
            host_bandwidth: Bytes a second of the host's memory; None where it bounds nothing.
            disk_bandwidth: Bytes a second that the disk reads or writes.
            disk_duplex: Whether it has them for each.
            is_compiled: As in `Rates`.
        """
        return Rates(
            flops=efficiency * (self.fp32_flops if in_fp32 else self.peak_flops),
            efficiency=efficiency,
            memory_bandwidth=self.memory_bandwidth,
            bus_bandwidth=BUS_EFFICIENCY * self.bus_bandwidth if bus_bandwidth is None else bus_bandwidth,
            duplex=duplex,
            host_bandwidth=host_bandwidth,
            link_bandwidth=None if self.link_bandwidth is None else BUS_EFFICIENCY * self.link_bandwidth,
            disk_bandwidth=disk_bandwidth,
            disk_duplex=disk_duplex,
            is_compiled=is_compiled,
        )


@cache
def known_cards() -> dict[str, Card]:
    """The cards of `cards.toml` by short name."""
    text = files("slivertune.planning").joinpath("cards.toml").read_text(encoding="utf-8")
    return {
        key: Card(**{**figures, "device_names": tuple(figures["device_names"])})
        for key, figures in tomllib.loads(text).items()
    }


def card_named(name: str) -> Card:
    """A known card.

    Raises:
        ValueError: If there is none of that name.
    """
    check_choice("card", name, tuple(known_cards()))
    return known_cards()[name]


def find_card(name: str | None) -> Card:
    """A known card, or the one that is here.

    Args:
        name: Its short name; None for the CUDA device that torch takes by default.

    Raises:
        ValueError: If there is none of that name, or none here that is known.
    """
    if name is not None:
        return card_named(name)
    choices = f"name one by --gpu ({', '.join(known_cards())})"
    if not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here whose rates could be taken; {choices}")
    found = card_here()
    if found is None:
        raise ValueError(f"the rates of {torch.cuda.get_device_name()} are not known; {choices}")
    return found


def card_here() -> Card | None:
    """The CUDA device that torch takes by default; None where there is none, or none that is known."""
    if not torch.cuda.is_available():
        return None
    present = torch.cuda.get_device_name()
    return next((card for card in known_cards().values() if present in card.device_names), None)
