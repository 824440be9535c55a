"""When weights are reselected, and how many are replaced (SFT, section 3.2 and equation 9). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slivertune.sft.config import SFTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Update counts t start from 1: t is the number of finished updates."""

    first: int | None
    """t of the first reselection, which replaces all weights; None if the choice never changes."""
    interval: int
    """S: later reselections are at its multiples."""
    estimation_steps: int
    """gamma; 0 if nothing is estimated (MA)."""
    replacement_rate: float
    """alpha."""
    total_steps: int
    """T, after which nothing is reselected."""

    @classmethod
    def of(cls, config: SFTConfig, total_steps: int) -> Schedule:
        """The schedule of a run.

        Args:
            config: Settings.
            total_steps: Updates in the whole run (T).

        Raises:
            ValueError: If T is not positive.
        """
        if type(total_steps) is not int or total_steps < 1:
            raise ValueError(f"total_steps={total_steps!r} must be a positive integer, the updates of the whole run")
        estimates = config.selection == "accumulated_gradient"
        interval = config.reselection_interval
        first = None if interval is None else config.estimation_steps if estimates else interval
        return cls(
            first=first,
            interval=interval or 1,
            estimation_steps=config.estimation_steps if estimates else 0,
            replacement_rate=config.replacement_rate,
            total_steps=total_steps,
        )

    def next_reselection(self, updates: int) -> int | None:
        """The first t greater than `updates` at which weights are reselected, or None if there is none to come."""
        if self.first is None:
            return None
        following = self.first if updates < self.first else (updates // self.interval + 1) * self.interval
        return following if following <= self.total_steps else None

    def num_replaced(self, updates: int, num_active: int) -> int:
        """k(i, t): weights of a tensor to replace at t = `updates`, a reselection.

        Args:
            updates: t.
            num_active: Trained weights of the tensor (d_phi(i)).
        """
        if updates == self.first:
            return num_active
        left = max(0, self.total_steps - updates) / self.total_steps
        return int(self.replacement_rate * left * num_active)

    def open_phases(self, updates: int) -> tuple[int, ...]:
        """The reselections to whose estimation phases the update after `updates` finished ones belongs.

        With S < 2 gamma the first phase, which ends at gamma, and the second, which ends at S, overlap.
        """
        found: list[int] = []
        end = self.next_reselection(updates)
        while end is not None and end - updates <= self.estimation_steps:
            found.append(end)
            end = self.next_reselection(end)
        return tuple(found)

    def most_replaced_later(self, num_active: int) -> int:
        """At least as many weights as any reselection after the first replaces."""
        return math.ceil(self.replacement_rate * num_active)
