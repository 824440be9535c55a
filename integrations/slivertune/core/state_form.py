"""The form of what an optimizer's `state_dict` returns: its whole state, the same packed, or a placeholder.

Programs that gather, cut up or reshape an optimizer's state know it by parameter alone. `torch.distributed.checkpoint`
gets the whole state packed (see `pack_state`). Where the state is saved beside such programs, in a sidecar folder, they
get a placeholder, which tells them a count of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from slivertune.core.hyperparameters import load_hyperparameters
from slivertune.core.saved_state import is_initialising_step, pack_state, unpack_state


class StateForm:
    """Whether an optimizer shows a placeholder for its state, and whether what belongs to a loaded one has come.

    Args:
        method: The optimizer's name in messages; its lower case is the key of the saved state and of the placeholder.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._key = f"{method.lower()}_updates"
        self._awaited: int | None = None
        self._packs_next = False
        self.is_placeholder = False
        """Whether `state_dict` is a placeholder."""

    def is_initialising(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a step is no step but torch's, which fills the state of optimizers that have none yet.

        If so, the next state is saved packed.

        Args:
            param_groups: The optimizer's.
        """
        if not is_initialising_step(param_groups):
            return False
        self._packs_next = True
        return True

    def save(
        self, whole_state: Callable[[], dict[str, Any]], param_groups: Sequence[Mapping[str, Any]], updates: int
    ) -> dict[str, Any]:
        """The whole state, packed if `torch.distributed.checkpoint` is about to take it.

        Args:
            whole_state: Makes it.
            param_groups: The optimizer's.
            updates: Updates applied so far.
        """
        packs, self._packs_next = self._packs_next, False
        whole = whole_state()
        return pack_state(whole, param_groups, updates) if packs else whole

    def load(self, state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> Mapping[str, Any] | None:
        """Take what `state_dict` returned in any form.

        Args:
            state_dict: The saved state.
            param_groups: The optimizer's; they get the hyperparameters that a placeholder brings.

        Returns:
            The whole state, which is to be loaded; None if it was a placeholder, whose state has still to come.

        Raises:
            ValueError: If the state was packed and its bytes are lost.
        """
        self._packs_next = False
        unpacked = unpack_state(state_dict)
        whole = state_dict if unpacked is None else unpacked
        updates = self.updates_in(whole)
        if updates is None:
            return whole
        load_hyperparameters(param_groups, whole["param_groups"])
        # Nothing belongs to one without updates, such as that which accelerate's wrapper loads when it is made.
        self._awaited = updates or None
        return None

    def of_parameter(self, updates: int, device: torch.device) -> dict[str, Any]:
        """The placeholder of one parameter, which tells the number of updates.

        Args:
            updates: Updates applied so far.
            device: The parameter's.
        """
        # With a dimension: from tensors without one, torch.distributed.checkpoint can't tell the device.
        return {self._key: torch.tensor([updates], device=device)}

    def fill(self, state: dict[Any, Any], parameters: Iterable[torch.Tensor], updates: int) -> None:
        """Put the placeholder into an optimizer's `state`: programs that find it empty step with zeros to fill it.

        Args:
            state: The optimizer's, whose content is replaced.
            parameters: What it trains.
            updates: Updates applied so far.
        """
        state.clear()
        # One for each weight: torch.distributed.checkpoint misses the state of a weight that requires a gradient.
        state.update({each: self.of_parameter(updates, each.device) for each in parameters})
        if not state:
            state["released"] = self.of_parameter(updates, torch.device("cpu"))

    def updates_in(self, state_dict: Mapping[str, Any]) -> int | None:
        """The number of updates that a placeholder tells; None of any other state."""
        if self._method.lower() in state_dict:
            return None
        counts = [state[self._key] for state in state_dict.get("state", {}).values() if self._key in state]
        return int(counts[0]) if counts else None

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
