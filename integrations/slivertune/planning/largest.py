"""`--max batch_size`: the largest value of a setting under which a run fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slivertune.core.byte_text import format_bytes
from slivertune.planning.limits import describe_limits
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Tell

LargestField = Literal["batch_size", "seq_length"]

STEPS: dict[LargestField, int] = {"batch_size": 1, "seq_length": 128}
"""Numbers of which all values are multiples. 128 tokens are a tile of attention and matrix kernels."""
_MOST_STEPS = 2**16
_MOST_BY_LINE = 5
_MOST_GROWTH = 16
"""Largest factor from one value to the next. A line through tiny batches overshoots, and large batches take long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """Largest value that fits, and the next value, which does not."""

    field: LargestField
    value: int
    requirement: MemoryRequirement
    """Memory that the run requires with `value`."""
    next_value: int | None
    """Next value, which does not fit, or None if `value` is the most that the model takes."""
    next_device_bytes: int | None
    """Bytes that a GPU would need with `next_value`."""
    limits: Limits
    """Memory that the run may fill."""

    def describe(self) -> str:
        """Describe the result in one line."""
        text = f"{self.field} {self.value:,} is the largest that fits {describe_limits(self.limits)}"
        if self.next_value is None or self.next_device_bytes is None:
            return f"{text}, and the most that the model takes"
        return f"{text}; {self.next_value:,} would need {format_bytes(self.next_device_bytes)} on the GPU"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "field": self.field,
            "value": self.value,
            "next_value": self.next_value,
            "next_need_bytes": self.next_device_bytes,
        }


def find_largest(
    request: PlanRequest,
    field: LargestField,
    limits: Limits,
    estimate: Callable[[PlanRequest], MemoryRequirement],
    *,
    most: int | None = None,
    first: int = 1,
    tell: Tell = lambda line: None,
) -> Largest:
    """Plan values until one fits and the next does not.

    A peak is piecewise linear in the value, so a line through two plans gives the next value to try; after one plan,
    the activations alone do. If the peak is linear, this takes three or four plans: of the smallest value, of one or
    two near the largest, and of the next.

    Args:
        request: Run to plan; its own value of the field is not read.
        field: Field whose value grows.
        limits: Memory that the run may fill.
        estimate: Function that plans a request.
        most: Largest value to try; None for no bound.
        first: Value to try first, in steps (`STEPS`).
        tell: Function that takes a line per plan.

    Returns:
        The largest value.

    Raises:
        ValueError: If even the smallest value does not fit, or no bound was found.
    """
    step = STEPS[field]
    last = _MOST_STEPS if most is None else max(1, most // step)
    known: dict[int, MemoryRequirement] = {}

    def fits(index: int) -> bool:
        if index not in known:
            changes: dict[str, Any] = {field: index * step}
            known[index] = estimate(replace(request, **changes))
            tell(f"{field} {index * step:,}: {format_bytes(known[index].device_bytes)} with the allowance")
        return known[index].fits(limits)

    low, high = min(first, last), last + 1
    if not fits(low):
        low, high = 1, low
    if not fits(low):
        raise ValueError(
            f"{field} {step} needs {format_bytes(known[1].device_bytes)} on the GPU and "
            f"{format_bytes(known[1].host_bytes)} of host memory, and there are {describe_limits(limits)}. Leave out "
            f"--max {field}, and let --fit find other settings"
        )
    while high - low > 1:
        index = _next(known, low, high, limits)
        low, high = (index, high) if fits(index) else (low, index)
    if low == _MOST_STEPS:
        raise ValueError(
            f"{field} {low * step:,} still fits {describe_limits(limits)}, so --max found no bound. Plan with a "
            f"{field} of your choice"
        )
    after = known.get(high)
    return Largest(
        field=field,
        value=low * step,
        requirement=known[low],
        next_value=None if after is None else high * step,
        next_device_bytes=None if after is None else after.device_bytes,
        limits=limits,
    )


def _next(known: Mapping[int, MemoryRequirement], low: int, high: int, limits: Limits) -> int:
    """Return the next index to try between `low`, which fits, and `high`, by a line through two plans."""
    first, second = (low, high) if high in known else (max((each for each in known if each < low), default=low), low)
    # If the line bends in between, it leads there in small steps only. Every other plan then halves the interval.
    if high in known and len(known) > _MOST_BY_LINE and len(known) % 2:
        return (low + high) // 2
    grown, distance = known[second].device_bytes - known[first].device_bytes, second - first
    if first == second:
        grown, distance = max(group.activation_bytes for group in known[low].plan.groups), low
    if grown <= 0:
        return min(_MOST_GROWTH * low, high - 1)
    guess = first + (limits.device_bytes - known[first].device_bytes) * distance // grown
    return min(max(guess, low + 1), _MOST_GROWTH * low, high - 1)
