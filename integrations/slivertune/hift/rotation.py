"""Whose turn it is, and the learning rate held for a cycle (HiFT, Algorithm 1 and section 3.1). Pure, picklable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

LearningRate = float | torch.Tensor | None


@dataclass(kw_only=True, slots=True)
class Rotation:
    """Counts applied updates; everything else follows from the count."""

    order: tuple[int, ...]
    """Group indices in the order of their turns."""
    steps_per_group: int
    """Updates in one turn."""
    updates: int = 0
    """Updates applied so far; a skipped step is none."""
    held_lr: list[LearningRate] = field(default_factory=list)
    """The learning rate of the running cycle, one a parameter group; empty before the first update."""

    @property
    def cycle_length(self) -> int:
        """Updates in which every group has one turn."""
        return len(self.order) * self.steps_per_group

    @property
    def active_group(self) -> int:
        """Index of the group whose turn it is."""
        return self.order[self.updates // self.steps_per_group % len(self.order)]

    @property
    def starts_cycle(self) -> bool:
        """Whether the next update is the first of a cycle."""
        return self.updates % self.cycle_length == 0

    @property
    def ends_turn(self) -> bool:
        """Whether the next update is the last of the active group's turn."""
        return (self.updates + 1) % self.steps_per_group == 0

    def to_apply(self, scheduled: Sequence[LearningRate]) -> list[LearningRate]:
        """The learning rates of the next update: the schedule's where a cycle begins, else those that are held."""
        if not self.starts_cycle:
            return self.held_lr
        return [own_copy(lr) for lr in scheduled]

    def advance(self, applied: list[LearningRate]) -> None:
        """Count one update that was applied with these learning rates."""
        self.held_lr = applied
        self.updates += 1


def own_copy(value: Any) -> Any:
    """A hyperparameter that no one else can change: tensors are copied."""
    return value.clone() if isinstance(value, torch.Tensor) else value
