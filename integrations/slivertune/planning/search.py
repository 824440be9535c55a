"""`--fit`: the least costly settings under which a run fits."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slivertune.planning.byte_text import format_bytes
from slivertune.planning.candidates import Candidate, changed
from slivertune.planning.limits import describe_limits
from slivertune.planning.methods import planned, planned_methods
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.request import PlanRequest

Estimator = Callable[[PlanRequest], MemoryRequirement]
"""Plans a request; costs seconds."""
Tell = Callable[[str], None]
"""Shows progress."""
_Taken = tuple[Candidate, MemoryRequirement, MemoryRequirement]
"""A candidate that gained something, and what was needed before and after."""


class DoesNotFitError(ValueError):
    """Nothing that may be changed makes the run fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A setting that a search changed."""

    title: str
    """What it does."""
    cost: str
    """What it costs."""
    changes: dict[str, tuple[Any, Any]]
    """Fields of the request, before and after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search came to."""

    start: MemoryRequirement
    """What the run takes as it was asked for."""
    requirement: MemoryRequirement
    """What it takes as it was changed; it fits."""
    steps: tuple[Step, ...]
    """What was changed for it, the cheapest first; what proved needless in the end is not among them."""
    skipped: tuple[tuple[str, str], ...]
    """What was looked at and not changed, and why."""
    num_plans: int
    """Plans that were made."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, without what was found."""
        return {
            "need_bytes_as_asked": self.start.device_bytes,
            "host_bytes_as_asked": self.start.host_bytes,
            "disk_bytes_as_asked": self.start.disk_bytes,
            "steps": [
                {
                    "title": step.title,
                    "cost": step.cost,
                    "changes": {name: {"from": old, "to": new} for name, (old, new) in step.changes.items()},
                }
                for step in self.steps
            ],
            "skipped": [{"title": title, "reason": reason} for title, reason in self.skipped],
            "num_plans": self.num_plans,
        }


def start_of_search(given: dict[str, Any]) -> PlanRequest:
    """The run from which a search sets out: what the user set, and bf16 arithmetic where they left it open.

    Args:
        given: Fields of `PlanRequest` that the user set.

    Raises:
        ValueError: If these contradict each other.
    """
    method = given.get("method", PlanRequest().method)
    # What the method can't be is PlanRequest's to say.
    precision = planned(method).bf16_precision if method in planned_methods() else "fp32"
    return PlanRequest(**{"precision": precision, **given})


def search(
    start: PlanRequest,
    candidates: Sequence[Candidate],
    limits: Limits,
    estimate: Estimator,
    *,
    fixed: Collection[str] = (),
    tell: Tell = lambda line: None,
) -> Found:
    """Change settings in the order of their cost until the run fits; then take back what proved needless.

    Args:
        start: Where from.
        candidates: What may be changed, the cheapest first.
        limits: What there is.
        estimate: Plans a request and adds the allowance.
        fixed: Fields that stay as they are.
        tell: Told of each plan.

    Returns:
        The settings found.

    Raises:
        DoesNotFitError: If none are; says the least that would fit.
        ValueError: If the run can't be planned at all.
    """
    return _Search(candidates, limits, estimate, fixed, tell).run(start)


class _Search:
    def __init__(
        self, candidates: Sequence[Candidate], limits: Limits, estimate: Estimator, fixed: Collection[str], tell: Tell
    ) -> None:
        self._candidates = candidates
        self._limits = limits
        self._estimate = estimate
        self._fixed = frozenset(fixed)
        self._tell = tell
        self._requirements: dict[PlanRequest, MemoryRequirement] = {}
        self._reasons: dict[int, str] = {}
        self._moves_to_host = True

    def run(self, start: PlanRequest) -> Found:
        try:
            return self._run(start)
        except DoesNotFitError:
            # What moves bytes to a host without room for them was taken, since much can relieve the host afterwards.
            # Where nothing did, it is left; what both ways ask for is planned once.
            self._moves_to_host = False
            return self._run(start)

    def _run(self, start: PlanRequest) -> Found:
        requirement = as_asked = self._plan(start)
        taken: list[_Taken] = []
        remaining = list(self._candidates)
        while not requirement.fits(self._limits):
            candidate = self._next(remaining, requirement)
            if candidate is None:
                raise DoesNotFitError(self._complaint(start))
            remaining.remove(candidate)
            better = self._take(candidate, requirement)
            if better is not None:
                taken.append((candidate, requirement, better))
                requirement = better
        requirement, steps = self._take_back(requirement, taken)
        return Found(
            start=as_asked,
            requirement=requirement,
            steps=tuple(steps),
            skipped=self._skipped(steps),
            num_plans=len(self._requirements),
        )

    def _plan(self, request: PlanRequest) -> MemoryRequirement:
        if request not in self._requirements:
            self._requirements[request] = requirement = self._estimate(request)
            verdict = "fits" if requirement.fits(self._limits) else "does not fit"
            if not requirement.missing_device_bytes(self._limits):
                verdict += "".join(f", {short}" for short in self._shortages(requirement))
            size = format_bytes(requirement.device_bytes)
            self._tell(f"plan {len(self._requirements)}: {size} with the allowance, {verdict}")
        return self._requirements[request]

    def _next(self, remaining: Sequence[Candidate], requirement: MemoryRequirement) -> Candidate | None:
        """The cheapest candidate that can help; where the weights alone do not fit, of those that make them smaller."""
        able = []
        for candidate in remaining:
            reason = self._reason_against(candidate, requirement)
            if reason is None:
                able.append(candidate)
            else:
                self._reasons[id(candidate)] = reason
        plan, allowance = requirement.plan, requirement.allowance
        weights = 0 if plan.request.offload_parameters else plan.peak.parameters
        if weights + allowance.total - allowance.fragmentation > self._limits.device_bytes:
            able = [candidate for candidate in able if candidate.shrinks_weights] or able
        return able[0] if able else None

    def _reason_against(self, candidate: Candidate, requirement: MemoryRequirement) -> str | None:
        if not candidate.options(requirement.plan.request):
            return ""
        for name in candidate.fields:
            if name in self._fixed:
                return f"--{name} was set"
        return candidate.cannot_help(requirement, self._limits)

    def _take(self, candidate: Candidate, requirement: MemoryRequirement) -> MemoryRequirement | None:
        """The cheapest value of a candidate that fits, or that which needs least; None if it gains nothing."""
        options = candidate.options(requirement.plan.request)
        try:
            least = self._plan(options[-1])
        except (ValueError, ImportError) as error:
            self._reasons[id(candidate)] = f"can't be planned: {' '.join(str(error).split())}"
            return None
        if not self._gains(least, requirement):
            self._reasons[id(candidate)] = "it was planned, and gained nothing"
            return None
        return self._cheapest_fitting(options) if least.fits(self._limits) else least

    def _gains(self, after: MemoryRequirement, before: MemoryRequirement) -> bool:
        """Whether less is missing: on the GPU, or as much there and less elsewhere."""
        (device, elsewhere), (device_before, elsewhere_before) = (
            (on_device := each.missing_device_bytes(self._limits), each.missing_bytes(self._limits) - on_device)
            for each in (after, before)
        )
        if elsewhere > elsewhere_before and not self._moves_to_host:
            return False
        return (device, elsewhere) < (device_before, elsewhere_before)

    def _cheapest_fitting(self, options: Sequence[PlanRequest]) -> MemoryRequirement:
        """The first of the options that fits; the last does, and each needs no more than those before it."""
        low, high = 0, len(options) - 1
        while low < high:
            middle = (low + high) // 2
            if self._plan(options[middle]).fits(self._limits):
                high = middle
            else:
                low = middle + 1
        return self._plan(options[high])

    def _take_back(
        self, requirement: MemoryRequirement, taken: Sequence[_Taken]
    ) -> tuple[MemoryRequirement, list[Step]]:
        """Undo what a later, costlier candidate made needless, the costliest first."""
        kept = list(taken)
        for entry in sorted(taken[:-1], key=self._rank, reverse=True):
            candidate, before, after = entry
            names, now = _changes(before.plan.request, after.plan.request), requirement.plan.request
            values = (before.plan.request, *candidate.options(before.plan.request))
            options = [
                option for value in values for option in changed(now, **{name: getattr(value, name) for name in names})
            ]
            if not options:
                continue  # what was before does not go together with what was taken since
            # What needs more than the present value: the present one fits, and so does all that follows it.
            options = options[: options.index(now) + 1] if now in options else [options[0], now]
            requirement = self._cheapest_fitting(options)
            if requirement.plan.request == options[0]:
                kept.remove(entry)
                self._reasons[id(candidate)] = "needless after a costlier setting that had to be changed"
        return requirement, self._steps(kept, requirement)

    def _rank(self, entry: _Taken) -> int:
        return self._candidates.index(entry[0])

    def _steps(self, kept: Sequence[_Taken], final: MemoryRequirement) -> list[Step]:
        """Each changed field once, at the costliest candidate that changed it, with its first and its final value."""
        first: dict[str, Any] = {}
        by_candidate: dict[str, Candidate] = {}
        for candidate, before, after in sorted(kept, key=self._rank):
            for name, (old, _) in _changes(before.plan.request, after.plan.request).items():
                first.setdefault(name, old)
                by_candidate[name] = candidate
        return [
            Step(
                title=candidate.title,
                cost=candidate.cost,
                changes={
                    name: (first[name], getattr(final.plan.request, name))
                    for name in first
                    if by_candidate[name] is candidate
                },
            )
            for candidate in self._candidates
            if candidate in by_candidate.values()
        ]

    def _skipped(self, steps: Sequence[Step]) -> tuple[tuple[str, str], ...]:
        done = {step.title for step in steps}
        reasons = {each.title: self._reasons.get(id(each)) for each in self._candidates if each.title not in done}
        return tuple((title, reason) for title, reason in reasons.items() if reason)

    def _shortages(self, requirement: MemoryRequirement) -> list[str]:
        """What is short beside the GPU."""
        missing = {
            "host memory": requirement.missing_host_bytes(self._limits),
            "disk": requirement.missing_disk_bytes(self._limits),
        }
        return [f"{format_bytes(size)} short of {place}" for place, size in missing.items() if size]

    def _complaint(self, start: PlanRequest) -> str:
        limits = self._limits
        least = min(self._requirements.values(), key=lambda each: (each.missing_bytes(limits), each.device_bytes))
        changes = {name: new for name, (_, new) in _changes(start, least.plan.request).items()}
        changed = ", ".join(
            f"--{name} {str(new).lower() if isinstance(new, bool) else new}" for name, new in changes.items()
        )
        parts = f"{format_bytes(least.plan.peak_bytes)} at the peak, {format_bytes(least.allowance.total)} of allowance"
        text = (
            f"nothing that may be changed makes this fit {describe_limits(limits)}; "
            + "".join(f"the run is {short}; " for short in self._shortages(least))
            + f"the smallest GPU that would do has {format_bytes(least.device_bytes)} ({least.device_bytes:,} bytes: "
            f"{parts})"
        )
        if limits.host_bytes is not None:
            text += f", and {format_bytes(least.host_bytes)} of host memory"
        if limits.disk_bytes is not None and least.disk_bytes:
            text += f", and {format_bytes(least.disk_bytes)} of disk"
        text += f", with {changed}" if changed else ", as asked"
        in_the_way = {
            name: None
            for candidate in self._candidates
            if candidate.options(least.plan.request)
            for name in candidate.fields
            if name in self._fixed
        }
        if in_the_way:
            text += f"; not changed, as you set it: {', '.join(f'--{name}' for name in in_the_way)}"
        return text


def _changes(old: PlanRequest, new: PlanRequest) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, with both values."""
    pairs = {item.name: (getattr(old, item.name), getattr(new, item.name)) for item in fields(PlanRequest)}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}
