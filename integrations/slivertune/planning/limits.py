"""What a run may fill: what was given, and on the machine that trains what it has free."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slivertune.core.host_memory import available_host_bytes
from slivertune.planning.byte_text import format_bytes
from slivertune.planning.cards import card_named
from slivertune.planning.plan import LimitName, Limits, MemoryRequirement

_PLACES: dict[LimitName, tuple[str, str, str]] = {
    "host_bytes": ("host memory", "--fit_host", "64GiB"),
    "disk_bytes": ("disk", "--fit_disk", "500GiB"),
}
"""What each is called, the option that limits it, and a size."""


def trains_here(gpu: str | None) -> bool:
    """Whether the machine that plans has the GPU that trains.

    Args:
        gpu: The card that was named; None for the one that is here.

    Raises:
        ValueError: If no such card is known.
    """
    if not torch.cuda.is_available():
        return False
    return gpu is None or torch.cuda.get_device_name() in card_named(gpu).device_names


def limits_of(
    device_bytes: int,
    *,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    here: bool = False,
    num_gpus: int = 1,
) -> Limits:
    """The limits of a run; where it trains on this machine, those that were not given are what is free here.

    Host memory is what the machine and the control groups of this process leave, the disk that of the present folder,
    where the printed command puts its state; the processes of the GPUs here share both.

    Args:
        device_bytes: Memory of one GPU.
        host_bytes: Host memory for one process; None where it was not given.
        disk_bytes: Disk for one process; None where it was not given.
        here: Whether it trains on this machine.
        num_gpus: GPUs of the run.
    """
    limits = Limits(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes)
    if not here:
        return limits
    num_processes = max(1, min(num_gpus, torch.cuda.device_count()))
    free = {"host_bytes": available_host_bytes(), "disk_bytes": shutil.disk_usage(Path.cwd()).free}
    assumed = {
        name: size // num_processes
        for name in _PLACES
        if getattr(limits, name) is None and (size := free[name]) is not None
    }
    return replace(limits, **assumed, assumed=frozenset(assumed))


def describe_limits(limits: Limits) -> str:
    """All limits in a few words; the GPU's memory alone is its size alone.

    Args:
        limits: What there is.
    """
    parts = [format_bytes(limits.device_bytes)]
    for name, (place, _, _) in _PLACES.items():
        size = getattr(limits, name)
        if size is not None:
            source = " that this machine has free" if name in limits.assumed else ""
            parts.append(f"{format_bytes(size)} of {place}{source}")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def unlimited_needs(requirement: MemoryRequirement, limits: Limits) -> list[str]:
    """What a run takes where nothing was said of what there is, a line each.

    Args:
        requirement: What it takes.
        limits: What there is.
    """
    each = " for each process" if requirement.plan.request.num_gpus > 1 else ""
    needs = [(getattr(requirement, name), getattr(limits, name), *about) for name, about in _PLACES.items()]
    return [
        f"needs {format_bytes(size)} of {place}{each}, and no limit was given; {option} {example} makes it a limit"
        for size, limit, place, option, example in needs
        if size and limit is None
    ]


def fit_json(requirement: MemoryRequirement, limits: Limits) -> dict[str, Any]:
    """The limits, which of them were assumed, and whether each is kept; None where there is none.

    Args:
        requirement: What a run takes.
        limits: What there is.
    """
    return {
        **limits_json(limits),
        "fits": requirement.fits(limits),
        "fits_device": not requirement.missing_device_bytes(limits),
        "fits_host": None if limits.host_bytes is None else not requirement.missing_host_bytes(limits),
        "fits_disk": None if limits.disk_bytes is None else not requirement.missing_disk_bytes(limits),
        "warnings": unlimited_needs(requirement, limits),
    }


def limits_json(limits: Limits) -> dict[str, Any]:
    """Plain JSON.

    Args:
        limits: What there is.
    """
    return {
        "limit_bytes": limits.device_bytes,
        "host_limit_bytes": limits.host_bytes,
        "disk_limit_bytes": limits.disk_bytes,
        "assumed": [f"{name.removesuffix('_bytes')}_limit_bytes" for name in sorted(limits.assumed)],
    }
