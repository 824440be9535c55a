"""One real step under the ledger: the peak, when it came, what each trained gradient took, and what was computed."""

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
"""Runs the model on a batch and returns the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePeak:
    """The largest total of an update alone: what no batch changes, but for tensors of the batch itself."""

    census: Census
    """Bytes alive at that moment."""
    highest: Census
    """Each kind's own largest value."""
    before: Census
    """Bytes alive when the update began."""
    after: Census
    """Bytes alive when it was over."""
    work: Work
    """What it computed and copied."""

    def beside(self, residual: int) -> "UpdatePeak":
        """The same beside another batch.

        Args:
            residual: Bytes that no one claims when the update begins.
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
    """The largest total of a step."""

    census: Census
    """Bytes alive at that moment."""
    phase: Phase
    """What the step did then."""
    highest: Census
    """Each kind's own largest value in the step."""
    gradients: int
    """Bytes of gradients alive when the backward was over."""
    activations: int
    """The largest residual until then."""
    before_step: Census
    """Bytes alive at the largest total until the update began."""
    after: Census
    """Bytes alive when the step was over."""
    update: UpdatePeak
    """The update alone."""
    work: StepWork
    """What the step computed and copied."""


def measure_step(
    ledger: Ledger,
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    *,
    num_backwards: int = 1,
    known: UpdatePeak | None = None,
    blocks_of: nn.Module | None = None,
) -> StepPeak:
    """Run a forward, its backward and the update.

    Args:
        ledger: Counts; entered.
        forward: The model's forward.
        optimizer: Holds the parameters that train.
        num_backwards: Forwards and backwards before the update; the third is like the second.
        known: The same update after another batch; gradients are dropped then, and nothing is updated.
        blocks_of: A model whose blocks are told apart in the work of backward passes.

    Returns:
        The step's peak.
    """
    ledger.reset_peak()
    heights: dict[int, Phase] = {}
    counter = WorkCounter(blocks_of)
    for index in range(num_backwards):
        with counter.counting(("forward", index)):
            loss = forward()
        # The peak only grows: each height belongs to the phase that reached it.
        heights.setdefault(ledger.peak.device, "forward")
        is_last = index == num_backwards - 1
        with FakeOverrides(), within_update(optimizer, is_last=is_last), counter.counting(("backward", index)):
            loss.backward()
        del loss
        heights.setdefault(ledger.peak.device, "backward")
    before_step = ledger.peak
    # `current` claims all gradients again, those that another rank keeps included.
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
    """The step with the largest total: of the first update, which makes the state, and of a later one.

    Args:
        first: The first update alone: its forward and backward have no more than those of the second.
        second: A step that has its state from the beginning.
        phase: In which the first makes its update.
    """
    first = first.beside(second.update.before.residual)
    if first.census.device > second.census.device:
        return replace(second, census=first.census, phase=phase)
    return second


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters have gradients of which nobody asks where they come from."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)


def measure_update(ledger: Ledger, optimizer: torch.optim.Optimizer) -> UpdatePeak:
    """Run an update for which gradients are there.

    Args:
        ledger: Counts; entered.
        optimizer: Holds the parameters that train.
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
    """Let ledgers count an optimizer's state as such.

    Args:
        optimizer: Keeps its state where `torch.optim.Optimizer` does; HiFT claims its own.
    """
    for values in optimizer.state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor):
                claim(value, "state")


def _highest(one: Census, other: Census) -> Census:
    return Census(**{name: max(size, getattr(other, name)) for name, size in asdict(one).items()})


def within_update(optimizer: torch.optim.Optimizer, *, is_last: bool) -> AbstractContextManager[object]:
    """What a backward of an update runs in: HiFT alone asks whether it is the last.

    Args:
        optimizer: Holds the parameters that train.
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
    """What a step was measured to need.

    Args:
        peak: Of the step.
        name: What trains in it.
        num_parameters: Elements that train.
        gradient_bytes: Of all gradients together.
        largest_gradient_bytes: Of the largest gradient.
        state_bytes: Of all that trains, without masters.
        master_bytes: Of all that trains.
        indices: Of this step, and of those alike.
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
    """The step with the largest total on the device."""
    return max(peaks, key=lambda peak: peak.census.device)


class GradientMeter:
    """Notes how large the gradient of each parameter was, the moment it was complete.

    Args:
        model: Its parameters are watched, those that train now or later.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bytes: dict[int, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def bytes_of(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes of the gradients that these had when last seen, together."""
        return sum(self._bytes.get(id(parameter), 0) for parameter in parameters)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let these have had none."""
        for parameter in parameters:
            self._bytes.pop(id(parameter), None)

    def has_seen(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether each of these had one since it was forgotten."""
        return all(id(parameter) in self._bytes for parameter in parameters)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._bytes[id(parameter)] = parameter.grad.nbytes


def autocast_of(enabled: bool) -> torch.autocast:
    """Autocast to bf16, or nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
