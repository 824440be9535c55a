"""What stands for a method's state in programs that gather, cut up or reshape an optimizer's state: a count of updates.

They know states by parameter alone. The state itself is saved beside them, in a sidecar folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class PlaceholderState:
    """Whether an optimizer shows a placeholder for its state, and whether what belongs to a loaded one has come.

    Args:
        method: The optimizer's name in messages; its lower case is the key of the saved state and of the placeholder.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._key = f"{method.lower()}_updates"
        self._awaited: int | None = None
        self.is_used = False
        """Whether `state_dict` is a placeholder."""

    def of_parameter(self, updates: int, device: torch.device) -> dict[str, Any]:
        """The state of one parameter that tells the number of updates.

        Args:
            updates: Updates applied so far.
            device: The parameter's.
        """
        # With a dimension: from tensors without one, torch.distributed.checkpoint can't tell the device.
        return {self._key: torch.tensor([updates], device=device)}

    def updates_in(self, state_dict: Mapping[str, Any]) -> int | None:
        """The number of updates that a placeholder tells; None of any other state."""
        if self._method.lower() in state_dict:
            return None
        counts = [state[self._key] for state in state_dict.get("state", {}).values() if self._key in state]
        return int(counts[0]) if counts else None

    def await_state(self, updates: int) -> None:
        """Note that a placeholder was loaded, made after so many updates."""
        # Nothing belongs to one without updates, such as that which accelerate's wrapper loads when it is made.
        self._awaited = updates or None

    def check(self, updates: int) -> None:
        """Refuse to go on from a placeholder alone.

        Args:
            updates: Of the state at hand.

        Raises:
            RuntimeError: If a placeholder of another number of updates was loaded.
        """
        if self._awaited is not None and self._awaited != updates:
            raise RuntimeError(
                f"the loaded checkpoint was made after {self._awaited} updates, but {self._method}'s own state, which "
                f"is saved in a folder beside it, is of {updates}; load the whole checkpoint with "
                "accelerator.load_state or the Trainer's resume_from_checkpoint, or the folder with "
                "slivertune.parallel.checkpoint.load_state"
            )
        self._awaited = None
