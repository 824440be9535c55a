"""On which terms HiFT steps where there are several ranks: by itself, through a layout's door, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

_UPDATES = "hift_updates"


class Door:
    """What HiFT was prepared for."""

    def __init__(self) -> None:
        self._door: str | None = None
        self._is_handed_over = False
        self._awaited: int | None = None

    @property
    def keeps_beside(self) -> bool:
        """Whether the state is stored in a folder of its own, and `state_dict` is a card."""
        return self._door is not None and not self._is_handed_over

    @property
    def is_handed_over(self) -> bool:
        """Whether an engine steps."""
        return self._is_handed_over

    def admit(self, door: str) -> None:
        """Let HiFT step under a layout."""
        self._door = door

    def hand_over(self, door: str) -> None:
        """Let an engine step from now on."""
        self._door, self._is_handed_over = door, True

    def await_state(self, updates: int) -> None:
        """Note that a card was loaded, made after so many updates."""
        # Nothing lies beside a card without updates, such as that which accelerate's wrapper loads when it is made.
        self._awaited = updates or None

    def check_step(self, updates: int) -> None:
        """Refuse a step that would be wrong.

        Args:
            updates: Updates applied so far.

        Raises:
            RuntimeError: Naming the way out.
        """
        self.check_state()
        if self._door is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"HiFT runs on {dist.get_world_size()} ranks that know nothing of each other's gradients; prepare it "
                "with slivertune.prepare(accelerator, ...), slivertune.initialize(...) for bare DeepSpeed, or "
                "slivertune.attach(trainer, ...) for the Trainer"
            )
        if self._awaited is not None and self._awaited != updates:
            raise RuntimeError(
                f"the loaded checkpoint was made after {self._awaited} updates, but HiFT's own state, which lies in a "
                f"folder beside it, is of {updates}; load the whole checkpoint with accelerator.load_state or the "
                "Trainer's resume_from_checkpoint, or the folder with slivertune.parallel.checkpoint.load_hift"
            )
        self._awaited = None

    def check_state(self) -> None:
        """Refuse what only makes sense while HiFT itself steps.

        Raises:
            RuntimeError: If an engine does.
        """
        if self._is_handed_over:
            raise RuntimeError(
                f"{self._door} steps in HiFT's place; step, save and load with what slivertune.prepare or "
                "slivertune.initialize returned"
            )


def card(updates: int, device: torch.device) -> dict[str, Any]:
    """The state that stands in a parameter's place.

    Args:
        updates: Updates applied so far.
        device: The parameters': where torch.distributed.checkpoint expects a tensor with dimensions.
    """
    return {_UPDATES: torch.tensor([updates], device=device)}


def updates_on_card(state_dict: Mapping[str, Any]) -> int | None:
    """The number of updates that a card tells; None of any other state."""
    if "hift" in state_dict:
        return None
    told = [state[_UPDATES] for state in state_dict.get("state", {}).values() if _UPDATES in state]
    return int(told[0]) if told else None
