"""`--fit`: the least costly settings under which a run fits.

Candidates are ordered by cost. To compare two ways to make a run fit, compare their costliest changed settings. The way
whose setting comes earlier is cheaper; for the same setting, the way with the earlier value. If the values are equal,
too, the next costliest settings decide, and so on. The number of changed settings does not count: any number of cheap
settings is cheaper than one that is costlier than each of them.

Planning all combinations would take hours. The search changes settings while they gain something. This determines the
costliest setting that is needed, and the search repeats among the cheaper ones, beginning with those of the last fit.
The result is exact if this procedure finds a fit among the cheaper ones whenever there is one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slivertune.core.byte_text import format_bytes
from slivertune.planning.candidates import Candidate
from slivertune.planning.impossible_fit import changed_fields, changed_options, describe_impossible, shortages
from slivertune.planning.methods import planned_methods
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.request import PlanRequest, precision_with_bf16

Estimator = Callable[[PlanRequest], MemoryRequirement]
"""Function that plans a request, which takes seconds."""
Tell = Callable[[str], None]
"""Function that shows a line of progress."""
_Taken = tuple[Candidate, PlanRequest]
"""Candidate that was changed, and the resulting request."""


class DoesNotFitError(ValueError):
    """No setting that may be changed makes the run fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Setting that a search changed."""

    title: str
    """Effect of the change."""
    cost: str
    """Cost of the change."""
    changes: dict[str, tuple[Any, Any]]
    """Values of the request's fields, before and after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a search."""

    start: MemoryRequirement
    """Memory that the run requires as requested."""
    requirement: MemoryRequirement
    """Memory that the changed run requires, which fits."""
    steps: tuple[Step, ...]
    """Changed settings, the cheapest first, without those that proved unnecessary in the end."""
    skipped: tuple[tuple[str, str], ...]
    """Titles of settings that were considered but not changed, with the reasons."""
    num_plans: int
    """Number of plans that were made."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, without the requirement that was found."""
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
    """Return the run from which a search starts: the user's settings, and bf16 unless they set a precision.

    Args:
        given: Fields of `PlanRequest` that the user set.

    Raises:
        ValueError: If the settings contradict each other.
    """
    method = given.get("method", PlanRequest().method)
    # PlanRequest itself refuses an unknown method.
    precision = precision_with_bf16(method, given.get("master")) if method in planned_methods() else "fp32"
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
    """Find the cheapest settings under which the run fits, in the order that this module's docstring defines.

    Takes a handful of plans, or some dozens if settings have many values or help only together.

    Args:
        start: Run as requested.
        candidates: Settings that may be changed, the cheapest first.
        limits: Memory that the run may fill.
        estimate: Function that plans a request and adds the allowance.
        fixed: Fields that must not change.
        tell: Function that takes a line per plan.

    Returns:
        The settings found.

    Raises:
        DoesNotFitError: If no settings fit; says the least that would fit.
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
        self._tried: set[int] = set()
        self._companions: list[Candidate] = []
        """Candidates of the last fit, from which the next descent begins."""

    def run(self, start: PlanRequest) -> Found:
        as_asked = self._plan(start)
        taken = self._least(start, self._candidates)
        if taken is None:
            raise DoesNotFitError(
                describe_impossible(start, self._requirements.values(), self._limits, self._candidates, self._fixed)
            )
        final = taken[-1][1] if taken else start
        steps = self._steps(start, taken)
        return Found(
            start=as_asked,
            requirement=self._plan(final),
            steps=tuple(steps),
            skipped=self._skipped(steps),
            num_plans=len(self._requirements),
        )

    @property
    def _has_found(self) -> bool:
        return any(requirement.fits(self._limits) for requirement in self._requirements.values())

    def _plan(self, request: PlanRequest) -> MemoryRequirement:
        if request not in self._requirements:
            self._requirements[request] = requirement = self._estimate(request)
            verdict = "fits" if requirement.fits(self._limits) else "does not fit"
            if not requirement.missing_device_bytes(self._limits):
                verdict += "".join(f", {short}" for short in shortages(requirement, self._limits))
            size, changes = format_bytes(requirement.device_bytes), self._changes_in(request)
            self._tell(f"plan {len(self._requirements)}{changes}: {size} with the allowance, {verdict}")
        return self._requirements[request]

    def _changes_in(self, request: PlanRequest) -> str:
        """Return the settings that differ from the run as requested, as options after a comma."""
        options = changed_options(next(iter(self._requirements)), request)
        return f", {options}" if options else ""

    def _least(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[_Taken] | None:
        """Return the cheapest changes that fit, the costliest of them first, or None if none are found.

        The costliest is the first candidate that suffices if all cheaper ones may be changed, too. Once it is changed,
        the rest is found among the cheaper ones.
        """
        found, known, number = self._fit(request, candidates), None, len(candidates)
        while found:
            known, number = found, max(candidates.index(candidate) for candidate, _ in found)
            found = self._fit(request, candidates[:number])
        if known is None or found is not None:
            return found
        costliest, cheaper = candidates[number], candidates[:number]
        option = self._cheapest_option(costliest.options(request), cheaper)
        rest = None if option is None else self._least(option, cheaper)
        if option is None or rest is None:
            return known  # these fit only in the order of the descent
        return [(costliest, option), *rest]

    def _cheapest_option(self, options: Sequence[PlanRequest], cheaper: Sequence[Candidate]) -> PlanRequest | None:
        """Return the first option that fits with cheaper candidates. Each needs no more than the options before it."""
        low, high = 0, len(options)
        while low < high:
            middle = (low + high) // 2
            if self._fit(options[middle], cheaper) is not None:
                high = middle
            else:
                low = middle + 1
        return options[high] if high < len(options) else None

    def _fit(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[_Taken] | None:
        """Return changes by these candidates that fit (none if the run fits already), or None if there are none."""
        # First allow changes that move bytes to a full host, since later changes can relieve it. If these do not fit,
        # retry without them. A request of both tries is planned once.
        in_vain: list[list[_Taken]] = []
        for moves_to_host in (True, False):
            taken, fits = self._descend(request, candidates, moves_to_host=moves_to_host)
            if fits:
                self._companions = [candidate for candidate, _ in taken]
                return taken
            in_vain += [taken] if taken not in in_vain else []
        for taken in in_vain:
            in_the_way = self._in_the_way(request, candidates, taken)
            if in_the_way is not None:
                found = self._fit(request, [each for each in candidates if each is not in_the_way])
                if found is not None:
                    return found
        return None

    def _begin(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[_Taken]:
        """Return the changes from which to descend: those of the last fit, unless they could hinder others."""
        begun = self._apply(request, [each for each in self._companions if each in candidates])
        # A single change would save no plan.
        if len(begun) < 2 or any(candidate.may_hinder for candidate, _ in begun):
            return []
        try:
            requirement = self._plan(begun[-1][1])
        except (ValueError, ImportError):
            return []
        limits = self._limits
        is_short_elsewhere = requirement.missing_host_bytes(limits) or requirement.missing_disk_bytes(limits)
        return [] if is_short_elsewhere else begun

    def _descend(
        self, request: PlanRequest, candidates: Sequence[Candidate], *, moves_to_host: bool
    ) -> tuple[list[_Taken], bool]:
        """Take the cheapest change that gains something until the run fits, and return whether it does."""
        taken = self._begin(request, candidates)
        try:
            requirement = self._plan(taken[-1][1] if taken else request)
        except (ValueError, ImportError):
            return [], False
        known = [candidate for candidate, _ in taken]
        remaining, without_gain = [each for each in candidates if each not in known], list[Candidate]()
        while not requirement.fits(self._limits):
            candidate = self._next(remaining, requirement)
            if candidate is not None:
                remaining.remove(candidate)
                better = self._take(candidate, requirement, moves_to_host=moves_to_host)
                if better is None:
                    without_gain.append(candidate)
                    continue
                taken.append((candidate, better))
                self._tried.add(id(candidate))
            else:
                fewer = self._leave_one_out(request, taken, moves_to_host=moves_to_host)
                if fewer is None:
                    return self._take_together(taken, without_gain and remaining + without_gain, requirement)
                taken = fewer
            requirement = self._plan(taken[-1][1])
            # A candidate that gained nothing before may gain something now.
            remaining, without_gain = [each for each in candidates if each in remaining + without_gain], []
        return taken, True

    def _leave_one_out(
        self, request: PlanRequest, taken: Sequence[_Taken], *, moves_to_host: bool
    ) -> list[_Taken] | None:
        """Return the changes without one, or without all of the same fields, that hinder a later one, or None."""
        has_bounds = self._limits.host_bytes is not None or self._limits.disk_bytes is not None
        # Most changes that relieve the GPU make something larger elsewhere.
        earlier = [candidate for candidate, _ in taken[:-1] if candidate.may_hinder or has_bounds]
        alike = [[each for each in earlier if each.fields == candidate.fields] for candidate in earlier]
        for left_out in [[candidate] for candidate in earlier] + [each for each in alike if len(each) > 1]:
            fewer = self._apply(request, [candidate for candidate, _ in taken if candidate not in left_out])
            if not fewer:
                continue
            try:
                before, after = self._plan(taken[-1][1]), self._plan(fewer[-1][1])
            except (ValueError, ImportError):
                continue
            if self._gains(after, before, moves_to_host=moves_to_host):
                return fewer
        return None

    def _take_together(
        self, taken: list[_Taken], candidates: Sequence[Candidate], requirement: MemoryRequirement
    ) -> tuple[list[_Taken], bool]:
        """Take all remaining candidates: each alone gains nothing if two moments of an update are equally large."""
        more = self._apply(requirement.plan.request, candidates)
        try:
            fits = bool(more) and self._plan(more[-1][1]).fits(self._limits)
        except (ValueError, ImportError):
            fits = False
        return ([*taken, *more], True) if fits else (taken, False)

    def _apply(self, request: PlanRequest, candidates: Sequence[Candidate]) -> list[_Taken]:
        """Set each candidate to the value that needs least, the cheapest first, and skip those that change nothing."""
        changes: list[_Taken] = []
        for candidate in sorted(candidates, key=self._candidates.index):
            options = candidate.options(request)
            if options and self._set_by_user(candidate, request) is None:
                request = options[-1]
                changes.append((candidate, request))
        return changes

    def _in_the_way(
        self, request: PlanRequest, candidates: Sequence[Candidate], taken: Sequence[_Taken]
    ) -> Candidate | None:
        """Return the last candidate of a failed attempt that rules out a costlier one, or None."""
        steps = [(None, request), *taken]
        for (_, before), (candidate, after) in reversed(list(pairwise(steps))):
            assert candidate is not None
            for costlier in candidates[candidates.index(candidate) + 1 :]:
                is_free = self._set_by_user(costlier, before) is None
                if is_free and costlier.options(before) and not costlier.options(after):
                    return candidate if all(each is not costlier for each, _ in taken) else None
        return None

    def _next(self, remaining: Sequence[Candidate], requirement: MemoryRequirement) -> Candidate | None:
        """Return the cheapest candidate that can help. If the weights alone do not fit, it has to shrink them."""
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
            shrinking = [candidate for candidate in able if candidate.shrinks_weights]
            # If nothing fits, it is worth knowing how far the others would get.
            able = shrinking or ([] if self._has_found else able)
        return able[0] if able else None

    def _reason_against(self, candidate: Candidate, requirement: MemoryRequirement) -> str | None:
        if not candidate.options(requirement.plan.request):
            return ""
        name = self._set_by_user(candidate, requirement.plan.request)
        return candidate.cannot_help(requirement, self._limits) if name is None else f"--{name} was set"

    def _set_by_user(self, candidate: Candidate, request: PlanRequest) -> str | None:
        """Return a field of a candidate that stays as the user set it, or None."""
        changed = [name for option in candidate.options(request)[-1:] for name in changed_fields(request, option)]
        names = (*candidate.fields, *(name for name in candidate.needs if name in changed))
        return next((name for name in names if name in self._fixed), None)

    def _take(self, candidate: Candidate, requirement: MemoryRequirement, *, moves_to_host: bool) -> PlanRequest | None:
        """Return the request with the candidate's value that needs least, or None if it gains nothing."""
        # Usually the last option needs least. Chunks of another size can turn the last two round.
        for least in reversed(candidate.options(requirement.plan.request)[-2:]):
            try:
                after = self._plan(least)
            except (ValueError, ImportError) as error:
                self._reasons[id(candidate)] = f"can't be planned: {' '.join(str(error).split())}"
                continue
            self._reasons[id(candidate)] = "it was planned, and gained nothing"
            if self._gains(after, requirement, moves_to_host=moves_to_host):
                return least
        return None

    def _gains(self, after: MemoryRequirement, before: MemoryRequirement, *, moves_to_host: bool) -> bool:
        """Return whether fewer bytes are missing on the GPU, or as many there and fewer elsewhere."""
        (device, elsewhere), (device_before, elsewhere_before) = (
            (on_device := each.missing_device_bytes(self._limits), each.missing_bytes(self._limits) - on_device)
            for each in (after, before)
        )
        if elsewhere > elsewhere_before and not moves_to_host:
            return False
        return (device, elsewhere) < (device_before, elsewhere_before)

    def _steps(self, start: PlanRequest, taken: Sequence[_Taken]) -> list[Step]:
        """List each changed field at the costliest candidate that changed it, with its first and its final value."""
        by_candidate: dict[str, Candidate] = {}
        before = start
        for candidate, after in taken:
            for name in changed_fields(before, after):
                known = by_candidate.get(name, candidate)
                by_candidate[name] = max(known, candidate, key=self._candidates.index)
            before = after
        changes = {name: pair for name, pair in changed_fields(start, before).items() if name in by_candidate}
        return [
            Step(
                title=candidate.title,
                cost=candidate.cost,
                changes={name: pair for name, pair in changes.items() if by_candidate[name] is candidate},
            )
            for candidate in self._candidates
            if any(by_candidate[name] is candidate for name in changes)
        ]

    def _skipped(self, steps: Sequence[Step]) -> tuple[tuple[str, str], ...]:
        titles = [each.title for each in self._candidates]
        costliest = max((titles.index(step.title) for step in steps), default=-1)
        done = {step.title for step in steps}
        for index, candidate in enumerate(self._candidates):
            if id(candidate) in self._tried:
                self._reasons[id(candidate)] = (
                    "needless after a costlier setting that had to be changed"
                    if index < costliest
                    else "needless, since cheaper settings suffice"
                )
        reasons = {each.title: self._reasons.get(id(each)) for each in self._candidates if each.title not in done}
        return tuple((title, reason) for title, reason in reasons.items() if reason)
