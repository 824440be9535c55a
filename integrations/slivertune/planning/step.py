"""One real step under the ledger: its peak, the phase of the peak, the size of each gradient, and the work."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from slivertune.core.ledger import Census, Ledger, claim
from slivertune.planning.counter import WorkCounter
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.plan import GroupPlan, Moment, Phase
from slivertune.planning.step_work import STEP, StepWork, Work

Forward = Callable[[], torch.Tensor]
"""Function that runs the model on a batch and returns the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePeak:
    """Peak of an update alone, which no batch changes, except for tensors of the batch itself."""

    census: Census
    """Bytes alive at that moment."""
    highest: Census
    """Largest bytes of each kind."""
    before: Census
    """Bytes alive when the update began."""
    after: Census
    """Bytes alive when the update ended."""
    work: Work
    """Work of the update."""

    def beside(self, residual: int) -> "UpdatePeak":
        """Return the same peak with another batch.

        Args:
            residual: Bytes that no owner claims when the update begins.
        """
        more = residual - self.before.residual
        moved = {
            name: replace(census, residual=census.residual + more)
            for name in ("census", "highest", "before", "after")
            for census in (getattr(self, name),)
        }
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeak:
    """Peak of a step."""

    census: Census
    """Bytes alive at that moment."""
    phase: Phase
    """Phase of the step at that moment."""
    highest: Census
    """Largest bytes of each kind in the step."""
    gradients: int
    """Bytes of gradients alive when the backward ended."""
    activations: int
    """Largest residual bytes until the backward ended."""
    before_step: Census
    """Bytes alive at the largest total before the update began."""
    after: Census
    """Bytes alive when the step ended."""
    update: UpdatePeak
    """Peak of the update alone."""
    work: StepWork
    """Work of the step."""


def measure_step(
    ledger: Ledger,
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    *,
    num_backwards: int = 1,
    known: UpdatePeak | None = None,
    blocks_of: nn.Module | None = None,
) -> StepPeak:
    """Run the forwards, the backwards and the update of a step.

    Args:
        ledger: Ledger that counts; already entered.
        forward: Forward of the model.
        optimizer: Optimizer of the parameters that train.
        num_backwards: Forwards and backwards before the update; the third is like the second.
        known: Peak of the same update after another batch. If given, gradients are dropped and nothing is updated.
        blocks_of: Model whose blocks are counted separately in the work of backward passes.

    Returns:
        The step's peak.
    """
    ledger.reset_peak()
    heights: dict[int, Phase] = {}
    counter = WorkCounter(blocks_of)
    for index in range(num_backwards):
        with counter.counting(("forward", index)):
            loss = forward()
        # The peak only grows, so each height belongs to the phase that reached it first.
        heights.setdefault(ledger.peak.device, "forward")
        is_last = index == num_backwards - 1
        with FakeOverrides(), within_update(optimizer, is_last=is_last), counter.counting(("backward", index)):
            loss.backward()
        del loss
        heights.setdefault(ledger.peak.device, "backward")
    before_step = ledger.peak
    # `current` claims all gradients again, including those that another rank keeps.
    before, highest = ledger.current(), ledger.highest
    if known is None:
        update = measure_update(ledger, optimizer)
    else:
        update = known.beside(before.residual)
        optimizer.zero_grad()
    is_update = update.census.device > before_step.device
    return StepPeak(
        census=update.census if is_update else before_step,
        phase="step" if is_update else heights[before_step.device],
        highest=_highest(highest, update.highest),
        gradients=before.gradients,
        activations=highest.residual,
        before_step=before_step,
        after=update.after,
        update=update,
        work=StepWork(
            forwards=tuple(counter.work_of(("forward", index)) for index in range(num_backwards)),
            backwards=tuple(counter.by_place(("backward", index)) for index in range(num_backwards)),
            step=update.work + counter.work_of(STEP),
        ),
    )


def larger_of_two(first: UpdatePeak, second: StepPeak, phase: Phase = "step") -> StepPeak:
    """Return a later step with its own peak, or with that of the first update, which makes the state, if larger.

    Args:
        first: Peak of the first update alone. Its forward and backward take no more than those of the second step.
        second: Peak of a step that has its state from the beginning.
        phase: Phase in which the first step makes its update.
    """
    first = first.beside(second.update.before.residual)
    if first.census.device > second.census.device:
        return replace(second, census=first.census, phase=phase)
    return second


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters gradients, for an update without a backward."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)


def measure_update(ledger: Ledger, optimizer: torch.optim.Optimizer) -> UpdatePeak:
    """Run an update whose gradients exist already.

    Args:
        ledger: Ledger that counts; already entered.
        optimizer: Optimizer of the parameters that train.
    """
    before = ledger.current()
    ledger.reset_peak()
    counter = WorkCounter()
    with FakeOverrides(), counter.counting(STEP):
        optimizer.step()
        optimizer.zero_grad()
    claim_state(optimizer)
    return UpdatePeak(
        census=ledger.peak,
        highest=ledger.highest,
        before=before,
        after=ledger.current(),
        work=counter.work_of(STEP),
    )


def claim_state(optimizer: torch.optim.Optimizer) -> None:
    """Claim an optimizer's state, so that ledgers count it as state.

    Args:
        optimizer: Optimizer that keeps its state where `torch.optim.Optimizer` does. HiFT claims its own state.
    """
    for values in optimizer.state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor):
                claim(value, "state")


def _highest(one: Census, other: Census) -> Census:
    return Census(**{name: max(size, getattr(other, name)) for name, size in asdict(one).items()})


def within_update(optimizer: torch.optim.Optimizer, *, is_last: bool) -> AbstractContextManager[object]:
    """Return the context for a backward of an update. Only HiFT needs to know whether it is the last.

    Args:
        optimizer: Optimizer of the parameters that train.
        is_last: Whether the update follows.
    """
    return nullcontext() if is_last else getattr(optimizer, "accumulating", nullcontext)()


def group_plan(
    peak: StepPeak,
    *,
    name: str,
    num_parameters: int,
    gradient_bytes: int,
    state_bytes: int,
    master_bytes: int = 0,
    largest_gradient_bytes: int = 0,
    indices: tuple[int, ...] = (0,),
) -> GroupPlan:
    """Return the plan of a group from its measured step.

    Args:
        peak: Peak of the step.
        name: Name of the part that trains.
        num_parameters: Number of elements that train.
        gradient_bytes: Bytes of all gradients together.
        largest_gradient_bytes: Bytes of the largest gradient.
        state_bytes: Bytes of optimizer state of all that trains, without masters.
        master_bytes: Bytes of the masters of all that trains.
        indices: Indices of this group, first, and of the groups alike.
    """
    index = indices[0]
    phase_before: Phase = "forward" if peak.phase == "forward" else "backward"
    return GroupPlan(
        index=index,
        indices=indices,
        peak=Moment(group=index, phase=peak.phase, **asdict(peak.census)),
        activation_bytes=peak.activations,
        host_activation_bytes=peak.highest.host_activations,
        before_step=Moment(group=index, phase=phase_before, **asdict(peak.before_step)),
        name=name,
        num_parameters=num_parameters,
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        master_bytes=master_bytes,
        largest_gradient_bytes=largest_gradient_bytes,
    )


def largest_of(peaks: Iterable[StepPeak]) -> StepPeak:
    """Return the step with the largest total on the device."""
    return max(peaks, key=lambda peak: peak.census.device)


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
