"""One real step under the ledger: its course, the size of each gradient, and the work."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from slivertune.core.ledger import Census, claim, claimed_as
from slivertune.planning.counter import WorkCounter
from slivertune.planning.course import Course, CourseLedger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.plan import GroupPlan, Moment, Phase
from slivertune.planning.step_work import STEP, StepWork, Work

Forward = Callable[[], torch.Tensor]
"""Function that runs the model on a batch and returns the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCourse:
    """Course of a phase of a step."""

    phase: Phase
    course: Course

    def beside(self, num_bytes: Mapping[str, int]) -> "PhaseCourse":
        """Return the same course beside more bytes, by field of `Census`."""
        return replace(self, course=self.course.with_more(num_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredUpdate:
    """Update alone, which no batch changes, except for tensors of the batch itself."""

    course: Course
    before: Census
    """Bytes alive when the update began."""
    after: Census
    """Bytes alive when the update ended."""
    work: Work
    """Work of the update."""

    def beside(self, activations: Census) -> "MeasuredUpdate":
        """Return the same update with the activations of another batch.

        Args:
            activations: Bytes alive when the update begins.
        """
        more = _more_activations(activations, self.before)
        before, after = (
            replace(each, **{kind: getattr(each, kind) + number for kind, number in more.items()})
            for each in (self.before, self.after)
        )
        return replace(self, course=self.course.with_more(more), before=before, after=after)


def _more_activations(one: Census, other: Census) -> dict[str, int]:
    """Return how many bytes of activations, and of what no owner claims, one moment has more than another."""
    return {kind: getattr(one, kind) - getattr(other, kind) for kind in ("residual", "host_activations")}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """Forwards, backwards and update of a step."""

    passes: tuple[PhaseCourse, ...]
    """Forwards and backwards."""
    gradients: int
    """Bytes of gradients alive when the backward ended."""
    update: MeasuredUpdate
    """Update alone."""
    earlier: tuple[PhaseCourse, ...] = ()
    """Phases of an earlier step that take more than those of this one."""
    work: StepWork
    """Work of the step."""

    @property
    def peak(self) -> tuple[Census, Phase]:
        """Bytes alive at the largest total, and its phase."""
        return _highest_of([*self.passes, PhaseCourse(phase="step", course=self.update.course), *self.earlier])

    @property
    def before_step(self) -> tuple[Census, Phase]:
        """Bytes alive at the largest total before the update began, and its phase."""
        return _highest_of(self.passes)

    @property
    def activations(self) -> int:
        """Largest residual bytes until the backward ended."""
        return max(each.course.highest_of("residual") for each in self.passes)

    def highest(self, kind: str) -> int:
        """Return the largest bytes of a kind in this step.

        Args:
            kind: Field of `Census`.
        """
        courses = [self.update.course, *(each.course for each in self.passes)]
        return max(course.highest_of(kind) for course in courses)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredGroup:
    """Steps that train the same weights, and what they train."""

    steps: tuple[MeasuredStep, ...]
    """Steps, of which the first with the largest total counts."""
    passes: tuple[MeasuredStep, ...] = ()
    """Further steps, of which only forwards and backwards count, and only for `GroupPlan.before_step`."""
    name: str
    """Name of the part that trains."""
    num_parameters: int
    """Number of elements that train."""
    gradient_bytes: int
    """Bytes of all gradients together."""
    largest_gradient_bytes: int = 0
    """Bytes of the largest gradient, if updates train different groups."""
    state_bytes: int
    """Bytes of optimizer state of all that trains, without masters."""
    master_bytes: int = 0
    """Bytes of the masters of all that trains."""
    offloaded_bytes: int = 0
    """Bytes of its masters and state that are offloaded between its turns."""
    work: StepWork | None = None
    """Work of its step, if other groups with steps alike leave out a part of it."""

    def plan(self, *indices: int) -> GroupPlan:
        """Return the plan of the group.

        Args:
            indices: Index of this group, and those of the groups alike.
        """
        peak, phase = max((each.peak for each in self.steps), key=_total)
        before_step, phase_before = max((each.before_step for each in (*self.steps, *self.passes)), key=_total)
        return GroupPlan(
            index=indices[0],
            indices=indices,
            peak=Moment(group=indices[0], phase=phase, **asdict(peak)),
            activation_bytes=max(each.activations for each in self.steps),
            host_activation_bytes=max(each.highest("host_activations") for each in self.steps),
            before_step=Moment(group=indices[0], phase=phase_before, **asdict(before_step)),
            name=self.name,
            num_parameters=self.num_parameters,
            gradient_bytes=self.gradient_bytes,
            state_bytes=self.state_bytes,
            master_bytes=self.master_bytes,
            largest_gradient_bytes=self.largest_gradient_bytes,
        )


def _highest_of(courses: Iterable[PhaseCourse]) -> tuple[Census, Phase]:
    return max(((each.course.peak, each.phase) for each in courses), key=_total)


def _total(moment: tuple[Census, Phase]) -> int:
    return moment[0].device


def measure_step(
    ledger: CourseLedger,
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    *,
    num_backwards: int = 1,
    known: MeasuredUpdate | None = None,
    blocks_of: nn.Module | None = None,
) -> MeasuredStep:
    """Run the forwards, the backwards and the update of a step.

    Args:
        ledger: Ledger that counts; already entered.
        forward: Forward of the model.
        optimizer: Optimizer of the parameters that train.
        num_backwards: Forwards and backwards before the update; the third is like the second.
        known: The same update after another batch. If given, gradients are dropped and nothing is updated.
        blocks_of: Model whose blocks are counted separately in the work of backward passes.
    """
    ledger.end_course()
    passes = []
    counter = WorkCounter(blocks_of)
    for index in range(num_backwards):
        with counter.counting(("forward", index)):
            loss = forward()
        passes.append(PhaseCourse(phase="forward", course=ledger.end_course()))
        is_last = index == num_backwards - 1
        with FakeOverrides(), within_update(optimizer, is_last=is_last), counter.counting(("backward", index)):
            loss.backward()
        del loss
        passes.append(PhaseCourse(phase="backward", course=ledger.end_course()))
    # `current` claims all gradients again, including those that another rank keeps.
    before = ledger.current()
    if known is None:
        update = measure_update(ledger, optimizer)
    else:
        update = known.beside(before)
        optimizer.zero_grad()
    return MeasuredStep(
        passes=tuple(passes),
        gradients=before.gradients,
        update=update,
        work=StepWork(
            forwards=tuple(counter.work_of(("forward", index)) for index in range(num_backwards)),
            backwards=tuple(counter.by_place(("backward", index)) for index in range(num_backwards)),
            step=update.work + counter.work_of(STEP),
        ),
    )


def with_first(second: MeasuredStep, first: MeasuredUpdate, *other: PhaseCourse) -> MeasuredStep:
    """Return a later step that also has the first update, which makes the state.

    Args:
        second: Step that has its state from the beginning. Its passes take no less than those of the first step.
        first: First update alone.
        other: Other phases of the first step.
    """
    more = _more_activations(second.update.before, first.before)
    phases = (PhaseCourse(phase="step", course=first.course), *other)
    return replace(second, earlier=tuple(each.beside(more) for each in phases))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(each.nbytes for each in model.parameters())


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters gradients, for an update without a backward."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)


def measure_update(ledger: CourseLedger, optimizer: torch.optim.Optimizer) -> MeasuredUpdate:
    """Run an update whose gradients exist already.

    Args:
        ledger: Ledger that counts; already entered.
        optimizer: Optimizer of the parameters that train.
    """
    before = ledger.current()
    ledger.end_course()
    counter = WorkCounter()
    with FakeOverrides(), counter.counting(STEP):
        optimizer.step()
        optimizer.zero_grad()
    claim_state(optimizer)
    course = ledger.end_course()
    return MeasuredUpdate(course=course, before=before, after=ledger.current(), work=counter.work_of(STEP))


def claim_state(optimizer: torch.optim.Optimizer) -> None:
    """Claim an optimizer's state, so that ledgers count it as state.

    Args:
        optimizer: Optimizer that keeps its state where `torch.optim.Optimizer` does. HiFT claims its own state.
    """
    for values in optimizer.state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and claimed_as(value) != "host":
                claim(value, "state")


def within_update(optimizer: torch.optim.Optimizer, *, is_last: bool) -> AbstractContextManager[object]:
    """Return the context for a backward of an update. Only HiFT needs to know whether it is the last.

    Args:
        optimizer: Optimizer of the parameters that train.
        is_last: Whether the update follows.
    """
    return nullcontext() if is_last else getattr(optimizer, "accumulating", nullcontext)()


class GradientMeter:
    """Records the bytes of each parameter's gradient at the moment when it is complete.

    Args:
        model: Model whose parameters are watched, if they require gradients at this time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bytes: dict[int, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def bytes_of(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the total bytes of the gradients that these parameters last had."""
        return sum(self._bytes.get(id(parameter), 0) for parameter in parameters)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget the gradients of these parameters."""
        for parameter in parameters:
            self._bytes.pop(id(parameter), None)

    def has_seen(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether each of these parameters has had a gradient since it was forgotten."""
        return all(id(parameter) in self._bytes for parameter in parameters)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._bytes[id(parameter)] = parameter.grad.nbytes


def autocast_of(enabled: bool) -> torch.autocast:
    """Return autocast to bf16, or a context that does nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
