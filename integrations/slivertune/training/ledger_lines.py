"""Lines of the memory ledger, one for each cycle that differs from the last. Only updates are counted."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core.ledger import Census, Ledger, claim

Cycle = Callable[[TrainerState], tuple[int, str]]
"""Function that returns the number of finished cycles and the name of the last one."""


class LedgerLines(TrainerCallback):
    """Counts the bytes allocated during updates and prints, at the end of a cycle, their peak by kind.

    Evaluation, generation and saving are not counted: the ledger is entered when an update begins and left when it
    ends. A line shows each kind's own highest value; these need not occur at the same moment. A cycle with the same
    line as the last one prints nothing.

    Args:
        model: Model that is trained.
        cycle: Function that counts and names cycles.
        say: Function that prints a line for the user.
        num_cycles: Number of cycles to count; None for all.
        claim_state: Callback whenever counting begins. It claims the state of an optimizer that had some before, which
            `Optimizer.state` does not show.
    """

    def __init__(
        self,
        model: nn.Module,
        cycle: Cycle,
        say: Callable[[str], None],
        num_cycles: int | None = None,
        claim_state: Callable[[], None] | None = None,
    ) -> None:
        self._ledger = Ledger(model)
        self._cycle_of = cycle
        self._say = say
        self._remaining = num_cycles
        self._claim_state = claim_state
        self._num_done = 0
        self._is_counting = False
        self._num_claimed = 0
        self._said = ""
        self.peak: Census | None = None
        """Census at the moment of the largest total on the device, over all updates counted."""
        self.highest: Census | None = None
        """Highest value of each kind, over all updates counted."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the cycle in which the run starts. A resumed run starts in the middle of one."""
        self._num_done, _ = self._cycle_of(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin counting."""
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
        """Stop counting, and print the cycle's line if the cycle is over."""
        if not self._is_counting:
            return
        self.close()
        peak, highest = self._ledger.peak, self._ledger.highest
        if self.peak is None or peak.device > self.peak.device:
            self.peak = peak
        before = asdict(highest if self.highest is None else self.highest)
        self.highest = Census(**{name: max(size, before[name]) for name, size in asdict(highest).items()})
        num_done, name = self._cycle_of(state)
        if num_done == self._num_done:
            return
        self._num_done = num_done
        if highest.line() != self._said:
            self._said = highest.line()
            self._say(f"{name}  {self._said}")
        self._ledger.reset_peak()
        if self._remaining is not None:
            self._remaining -= 1

    def close(self) -> None:
        """Stop counting, also in the middle of an update that failed. Do nothing if nothing is counted."""
        if self._is_counting:
            self._is_counting = False
            self._ledger.__exit__(None, None, None)
