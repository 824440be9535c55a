"""`--max batch_size`: the largest value of a setting under which a run fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slivertune.planning.byte_text import format_bytes
from slivertune.planning.limits import describe_limits
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Tell

LargestField = Literal["batch_size", "seq_length"]

STEPS: dict[LargestField, int] = {"batch_size": 1, "seq_length": 128}
"""Values are multiples of these; lengths of the tiles of attention and matrix kernels."""
_MOST_STEPS = 2**16
_MOST_BY_LINE = 5
_MOST_GROWTH = 16
"""From one value to the next: where the batch hardly counts yet a line leads anywhere, and large batches take long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest value that fits, and the one after it, which does not."""

    field: LargestField
    value: int
    requirement: MemoryRequirement
    """With it."""
    next_value: int | None
    """None where the value is the most that the model takes."""
    next_device_bytes: int | None
    """What a GPU would need with the next one."""
    limits: Limits
    """What there is."""

    def describe(self) -> str:
        """One line."""
        text = f"{self.field} {self.value:,} is the largest that fits {describe_limits(self.limits)}"
        if self.next_value is None or self.next_device_bytes is None:
            return f"{text}, and the most that the model takes"
        return f"{text}; {self.next_value:,} would need {format_bytes(self.next_device_bytes)} on the GPU"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
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
    tell: Tell = lambda line: None,
) -> Largest:
    """Plan values until one fits and the next does not.

    A peak grows in straight pieces, so that the next value to try is taken from the line through two. Four plans where
    there is but one piece: of 1, 2, the largest and the next.

    Args:
        request: The run; its own value of the field is not read.
        field: What grows.
        limits: What there is.
        estimate: Plans a request.
        most: The largest value to try; None for no bound.
        tell: Told of each plan.

    Returns:
        The largest value.

    Raises:
        ValueError: If not even the smallest value fits, or no bound was found.
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

    if not fits(1):
        raise ValueError(
            f"{field} {step} needs {format_bytes(known[1].device_bytes)} on the GPU and "
            f"{format_bytes(known[1].host_bytes)} of host memory, and there are {describe_limits(limits)}; leave out "
            f"--max {field} and let --fit find other settings"
        )
    low, high = 1, last + 1
    while high - low > 1:
        index = _next(known, low, high, limits)
        low, high = (index, high) if fits(index) else (low, index)
    if low == _MOST_STEPS:
        raise ValueError(f"{field} {low * step:,} still fits {describe_limits(limits)}; --max found no bound")
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
    """What to try between a value that fits and one that does not: the largest that fits by the line through two."""
    first, second = (low, high) if high in known else (max((each for each in known if each < low), default=low), low)
    # A line that turns in between would be followed in small steps.
    if high in known and len(known) > _MOST_BY_LINE and len(known) % 2:
        return (low + high) // 2
    grown = known[second].device_bytes - known[first].device_bytes
    if grown <= 0:
        return min(_MOST_GROWTH * low, high - 1)
    guess = first + (limits.device_bytes - known[first].device_bytes) * (second - first) // grown
    return min(max(guess, low + 1), _MOST_GROWTH * low, high - 1)
