"""Parts of HiFT: what happens beside the step of the active group, and the moments of a run at which each is told.

    attach                    the model gets its hooks; what it returns undoes that
    begin_turn                the turn of a group begins
        begin_forward         an outermost forward begins ...
        end_forward           ... and is over
        check_step            `step` is called, or the first weight is about to be stepped in the backward
        begin_step            the first weight of an update is about to be stepped, in the backward or after it
        end_step              the update is over, or skipped, and counted
    out_of_memory             a forward or backward had too little device memory
    after_save                the state of all groups has been read
    before_load               a checkpoint is about to be checked ...
    begin_load                ... and fits, so that all weights and state are replaced ...
    after_load                ... and are whole again
    detach                    the rotation ends, maybe for a while

All parts are told of a moment in the order of the list that `assemble` builds, and undone in the opposite order.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from slivertune.hift.group_state import GroupState
from slivertune.hift.rotation import LearningRate


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a group."""

    group: int
    """Index of the group."""
    coming: tuple[int, ...]
    """All groups in the order of their next turns, this one first."""
    state: GroupState
    """Owner of the group's state."""


@dataclass(frozen=True, slots=True)
class Update:
    """An update of the active group."""

    number: int
    """Number of updates before this one."""
    rates: list[LearningRate]
    """Learning rates to apply, one per param group."""


class Part:
    """A part of HiFT. It overrides the moments that it needs."""

    def attach(self, model: nn.Module) -> Callable[[], None] | None:
        """Put hooks on the model, or move its weights. Return the function that undoes it, if there is one."""
        return None

    def begin_turn(self, turn: Turn) -> None:
        """Begin the turn of a group."""

    def begin_forward(self, inputs: Any) -> None:
        """Begin an outermost forward.

        Args:
            inputs: Its arguments, in any nest, or None if it does not train.
        """

    def end_forward(self, *, has_succeeded: bool) -> None:
        """End the forward, also one that failed."""

    def check_step(self) -> None:
        """Refuse a step.

        Raises:
            OSError: If something has failed since the last step, and fails again.
        """

    def begin_step(self, update: Update) -> None:
        """Begin an update.

        Raises:
            OSError: If the state has no room. After any error here, nothing was stepped.
        """

    def end_step(self, *, ends_cycle: bool) -> bool:
        """End an update, stepped or skipped. The next turn has begun if it was the last of its turn.

        Args:
            ends_cycle: Whether every group has had its turn, and the bytes on the device are those of the cycle.

        Returns:
            Whether other bytes than before stay on the device from now on.
        """
        return False

    def out_of_memory(self) -> None:
        """Note a lack of device memory, before the next forward begins."""

    def after_save(self) -> None:
        """Load again what reading the state has displaced."""

    def before_load(self) -> None:
        """End all copies, since the state to load may be the one that they write."""

    def begin_load(self) -> None:
        """Forget everything that belongs to the old state."""

    def after_load(self) -> None:
        """Forget what followed from the old weights."""

    def detach(self) -> None:
        """Release what is on the device for the turns to come."""


def methods_by_moment(parts: Iterable[Part]) -> dict[str, list[Any]]:
    """Return the methods of all parts that do something, in the order of the parts, by the moment."""
    return {
        moment: [getattr(part, moment) for part in parts if getattr(type(part), moment) is not nothing]
        for moment, nothing in vars(Part).items()
        if not moment.startswith("_")
    }
