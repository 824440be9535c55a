"""What stands for SFT's state in programs that gather, cut up or reshape an optimizer's state: a number of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_UPDATES = "sft_updates"


class Card:
    """Whether SFT shows a card in place of its state, and whether what belongs to a loaded one has come."""

    def __init__(self) -> None:
        self.is_shown = False
        """Whether `state_dict` is a card."""
        self._awaited: int | None = None

    def awaits(self, updates: int) -> None:
        """Note that a card was loaded.

        Args:
            updates: What it tells.
        """
        # Nothing belongs to a card without updates, such as that which accelerate's wrapper loads when it is made.
        self._awaited = updates or None

    def check(self, updates: int) -> None:
        """Refuse to go on from a card alone.

        Args:
            updates: Of the state at hand.

        Raises:
            RuntimeError: If a card of another number of updates was loaded.
        """
        if self._awaited is not None and self._awaited != updates:
            raise RuntimeError(
                f"the loaded checkpoint was made after {self._awaited} updates, but SFT's own state, which lies in a "
                f"folder beside it, is of {updates}; load the whole checkpoint with accelerator.load_state or the "
                "Trainer's resume_from_checkpoint, or the folder with slivertune.parallel.checkpoint.load_sft"
            )
        self._awaited = None


def card_of(updates: int, device: torch.device) -> dict[str, Any]:
    """The state of one parameter that tells the number of updates."""
    # With a dimension: from tensors without one, torch's checkpointing can't tell the device.
    return {_UPDATES: torch.tensor([updates], device=device)}


def updates_on(state_dict: Mapping[str, Any]) -> int | None:
    """The number that a card tells; None of any other state."""
    if "sft" in state_dict:
        return None
    told = [state[_UPDATES] for state in state_dict.get("state", {}).values() if _UPDATES in state]
    return int(told[0]) if told else None
