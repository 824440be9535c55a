"""One line of the memory ledger a cycle, from a census taken during updates alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core.ledger import Census, Ledger, claim
from slivertune.hift import HiFT

Say = Callable[[str], None]


class Cycle(Protocol):
    """Counts the cycles of a method."""

    def num_done(self, state: TrainerState) -> int:
        """Cycles that are over.

        Args:
            state: The Trainer's.
        """

    def name(self, number: int) -> str:
        """What to call the cycle that ends as the `number`-th, from 1."""


@dataclass(frozen=True, slots=True)
class HiFTCycle:
    """Every group had its turn; or several such rounds, where one is too short for a line.

    Args:
        optimizer: Counts the updates.
        num_rounds: Rounds to a line.
    """

    optimizer: HiFT
    num_rounds: int

    def num_done(self, state: TrainerState) -> int:
        """Cycles that are over."""
        return self.optimizer.rotation.steps // (self.optimizer.cycle_length * self.num_rounds)

    def name(self, number: int) -> str:
        """By the number of the last round."""
        return f"cycle {number * self.num_rounds:>4}"


class DenseCycle:
    """As many updates as there are between two log lines."""

    def num_done(self, state: TrainerState) -> int:
        """Cycles that are over."""
        self._num_steps = max(1, int(state.logging_steps))
        return state.global_step // self._num_steps

    def name(self, number: int) -> str:
        """By the number of the last update."""
        return f"step {number * self._num_steps:>4}"


class LedgerLines(TrainerCallback):
    """Counts the bytes alive during updates and says, once a cycle, where they were at the cycle's peak.

    Evaluation, generation and saving are not counted: the ledger is entered when an update begins and left when it
    ends. A line shows each kind's own highest value; these need not have occurred at one moment.

    Args:
        model: The model that is trained.
        cycle: What makes a cycle.
        say: Shows a line to the user.
        num_cycles: Stop counting after this many cycles; None never stops.
        claim_state: Called whenever counting begins: claims the state of an optimizer that had some before, which
            `Optimizer.state` does not show.
    """

    def __init__(
        self,
        model: nn.Module,
        cycle: Cycle,
        say: Say,
        num_cycles: int | None = None,
        claim_state: Callable[[], None] | None = None,
    ) -> None:
        self._ledger = Ledger(model)
        self._cycles = cycle
        self._say = say
        self._remaining = num_cycles
        self._claim_state = claim_state
        self._cycle = 0
        self._is_counting = False
        self._num_claimed = 0
        self.peak: Census | None = None
        """The census at the moment of the largest total on the device, over all updates counted."""
        self.highest: Census | None = None
        """Each kind's own highest value, over all updates counted."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Learn in which cycle the run starts; a resumed one is in the midst of some."""
        self._cycle = self._cycles.num_done(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to count."""
        if self._remaining != 0 and not self._is_counting:
            self._ledger.__enter__()
            self._is_counting = True
            if self._claim_state is not None:
                self._claim_state()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Claim the state of an optimizer that does not claim it itself, as soon as there is some."""
        optimizer: torch.optim.Optimizer = kwargs["optimizer"]
        if self._is_counting and len(optimizer.state) != self._num_claimed:
            self._num_claimed = len(optimizer.state)
            for values in optimizer.state.values():
                for value in values.values() if isinstance(values, dict) else ():
                    if isinstance(value, torch.Tensor):
                        claim(value, "state")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop counting; say the cycle's line if the cycle is over."""
        if not self._is_counting:
            return
        self.close()
        peak, highest = self._ledger.peak, self._ledger.highest
        if self.peak is None or peak.device > self.peak.device:
            self.peak = peak
        self.highest = highest if self.highest is None else _larger(self.highest, highest)
        cycle = self._cycles.num_done(state)
        if cycle == self._cycle:
            return
        self._cycle = cycle
        self._say(f"{self._cycles.name(cycle)}  {highest.line()}")
        self._ledger.reset_peak()
        if self._remaining is not None:
            self._remaining -= 1

    def close(self) -> None:
        """Stop counting, also in the midst of an update that failed; harmless when nothing is counted."""
        if self._is_counting:
            self._is_counting = False
            self._ledger.__exit__(None, None, None)


def _larger(one: Census, other: Census) -> Census:
    names = (item.name for item in fields(Census))
    return Census(**{name: max(getattr(one, name), getattr(other, name)) for name in names})
