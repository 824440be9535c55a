"""Message for a run that no allowed change makes fit."""

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from slivertune.core.byte_text import format_bytes
from slivertune.planning.candidates import Candidate
from slivertune.planning.limits import describe_limits
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.request import PlanRequest


def describe_impossible(
    start: PlanRequest,
    requirements: Collection[MemoryRequirement],
    limits: Limits,
    candidates: Sequence[Candidate],
    fixed: Collection[str],
) -> str:
    """Describe the shortages, the smallest machine that would do with its settings, and the fields that the user fixed.

    Args:
        start: Run as it was requested.
        requirements: Requirements of all planned runs.
        limits: Memory and disk of the machine.
        candidates: Settings that the search could change.
        fixed: Fields that had to stay as they are.
    """
    least = min(requirements, key=lambda each: (each.missing_bytes(limits), each.device_bytes))
    settings = changed_options(start, least.plan.request)
    parts = f"{format_bytes(least.plan.peak_bytes)} at the peak, {format_bytes(least.allowance.total)} of allowance"
    text = (
        f"no setting that may change makes this fit {describe_limits(limits)}. "
        + "".join(f"The run is {short}. " for short in shortages(least, limits))
        + f"The smallest GPU that would do has {format_bytes(least.device_bytes)} ({least.device_bytes:,} bytes: "
        f"{parts})"
    )
    if limits.host_bytes is not None:
        text += f", and {format_bytes(least.host_bytes)} of host memory"
    if limits.disk_bytes is not None and least.disk_bytes:
        text += f", and {format_bytes(least.disk_bytes)} of disk"
    text += f", with {settings}" if settings else ", as asked"
    in_the_way = {
        name: None
        for candidate in candidates
        if candidate.options(start) or candidate.options(least.plan.request)
        for name in candidate.fields
        if name in fixed
    }
    if in_the_way:
        text += f". Not changed, as the command sets it: {', '.join(f'--{name}' for name in in_the_way)}"
    return text


def shortages(requirement: MemoryRequirement, limits: Limits) -> list[str]:
    """List the shortages of host memory and disk.

    Args:
        requirement: Memory and disk that a run needs.
        limits: Memory and disk of the machine.
    """
    missing = {
        "host memory": requirement.missing_host_bytes(limits),
        "disk": requirement.missing_disk_bytes(limits),
    }
    return [f"{format_bytes(size)} short of {place}" for place, size in missing.items() if size]


def changed_options(old: PlanRequest, new: PlanRequest) -> str:
    """Return the fields that differ as options, with their new values.

    Args:
        old: Request before the change.
        new: Request after the change.
    """
    changes = changed_fields(old, new).items()
    return ", ".join(
        f"--{name} {str(after).lower() if isinstance(after, bool) else after}" for name, (_, after) in changes
    )


def changed_fields(old: PlanRequest, new: PlanRequest) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, each with its old and new value.

    Args:
        old: Request before the change.
        new: Request after the change.
    """
    pairs = {item.name: (getattr(old, item.name), getattr(new, item.name)) for item in fields(PlanRequest)}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}
