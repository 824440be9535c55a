"""Limits of a run: the given ones, and the free memory of this machine if the run trains here."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slivertune.core.byte_text import format_bytes
from slivertune.core.host_memory import available_host_bytes
from slivertune.planning.cards import card_here, card_named
from slivertune.planning.plan import LimitName, Limits, MemoryRequirement

_PLACES: dict[LimitName, tuple[str, str, str]] = {
    "host_bytes": ("host memory", "--fit_host", "64GiB"),
    "disk_bytes": ("disk", "--fit_disk", "500GiB"),
}
"""Name of each place in messages, option that limits it, and example of a size."""


def trains_here(gpu: str | None) -> bool:
    """Return whether the machine that plans has the GPU that trains.

    Args:
        gpu: Name of the GPU; None for the GPU of this machine.

    Raises:
        ValueError: If no such GPU is known.
    """
    if not torch.cuda.is_available():
        return False
    return gpu is None or card_named(gpu) is card_here()


def limits_of(
    device_bytes: int,
    *,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    here: bool = False,
    num_gpus: int = 1,
) -> Limits:
    """Return the limits of a run. If it trains here, limits that were not given are this machine's free memory.

    The machine and the control groups of this process bound host memory. The disk is that of the current folder, where
    the printed command stores its state. The processes of this machine's GPUs share both.

    Args:
        device_bytes: Memory of one GPU, in bytes.
        host_bytes: Host memory for one process, in bytes; None if it was not given.
        disk_bytes: Disk space for one process, in bytes; None if it was not given.
        here: Whether the run trains on this machine.
        num_gpus: Number of the run's GPUs.
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
    """Describe all limits in a few words. If only the GPU is limited, return just its size.

    Args:
        limits: Limits to describe.
    """
    parts = [format_bytes(limits.device_bytes)]
    for name, (place, _, _) in _PLACES.items():
        size = getattr(limits, name)
        if size is not None:
            source = " that this machine has free" if name in limits.assumed else ""
            parts.append(f"{format_bytes(size)} of {place}{source}")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def unlimited_needs(requirement: MemoryRequirement, limits: Limits) -> list[str]:
    """Return a line for each place that a run needs and that has no limit.

    Args:
        requirement: Memory that the run requires.
        limits: Limits of the run.
    """
    each = " for each process" if requirement.plan.request.num_gpus > 1 else ""
    needs = [(getattr(requirement, name), getattr(limits, name), *about) for name, about in _PLACES.items()]
    return [
        f"needs {format_bytes(size)} of {place}{each}, and no limit was given. Give one by {option} {example}"
        for size, limit, place, option, example in needs
        if size and limit is None
    ]


def fit_json(requirement: MemoryRequirement, limits: Limits) -> dict[str, Any]:
    """Return the limits as JSON, with the assumed ones and whether each is kept (None for no limit).

    Args:
        requirement: Memory that the run requires.
        limits: Limits of the run.
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
    """Return limits as plain JSON.

    Args:
        limits: Limits to convert.
    """
    return {
        "limit_bytes": limits.device_bytes,
        "host_limit_bytes": limits.host_bytes,
        "disk_limit_bytes": limits.disk_bytes,
        "assumed": [f"{name.removesuffix('_bytes')}_limit_bytes" for name in sorted(limits.assumed)],
    }
