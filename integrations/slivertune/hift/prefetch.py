"""How many bytes of the device may hold pieces of a group's state ahead of their step, and when they are loaded."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from slivertune.core.device_memory import usable_bytes
from slivertune.core.outputs import tensors_of
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.residency import ResidentGroup

PrefetchBytes = int | Literal["auto"]

MARGIN_SHARE = 16
"""The sixteenth part of what may be used stays free: batches of one size do not take the same bytes every time."""


def has_own_memory(device: torch.device) -> bool:
    """Whether what is left on a device is worth a measurement."""
    return device.type == "cuda"


def unused_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that were free even at the peak so far; 0 of another device."""
    if device.type != "cuda":
        return 0
    usable = usable_bytes(device)
    return max(0, usable - torch.cuda.max_memory_reserved(device) - usable // MARGIN_SHARE)


class PrefetchBudget:
    """Decides it before each forward.

    A number holds for every forward that is no larger than its group has seen before; a larger one, whose activations
    may need the memory, gets nothing ahead of its first gradient. `auto` does the same with what nobody has used in
    the cycles so far, so nothing in the first.

    Args:
        setting: As in `HiFTConfig`.
    """

    def __init__(self, setting: PrefetchBytes) -> None:
        self._setting = setting
        self._seen: dict[int, tuple[int, int]] = {}
        self._num_bytes = 0 if setting == "auto" else setting

    @property
    def num_bytes(self) -> int:
        """What a forward of a known size may find held."""
        return self._num_bytes

    def begin_forward(self, group: int, inputs: Any) -> int:
        """Note a forward that trains.

        Args:
            group: The group whose turn it is.
            inputs: Of the forward, in any nest.

        Returns:
            Bytes that may be held ahead of the group's first gradient.
        """
        shapes = [tensor.shape for tensor in tensors_of(inputs)]
        # Attention grows with the longest dimension, all else with the number of elements.
        size = (sum(shape.numel() for shape in shapes), max((max(shape, default=1) for shape in shapes), default=0))
        seen = self._seen.get(group, (0, 0))
        self._seen[group] = (max(seen[0], size[0]), max(seen[1], size[1]))
        return self._num_bytes if self._seen[group] == seen else 0

    def fail(self) -> None:
        """A forward or backward has failed for lack of memory: `auto` holds nothing until the end of the next cycle."""
        self._seen.clear()
        self._num_bytes = 0 if self._setting == "auto" else self._setting

    def end_cycle(self, held_bytes: Mapping[torch.device, int]) -> None:
        """Measure what was left, if it is to be measured: the least of all devices, since the number holds for each.

        Args:
            held_bytes: By device, the bytes that are allocated there for pieces.
        """
        if self._setting == "auto":
            unused = {device: unused_bytes(device) for device in held_bytes}
            room = [unused[device] + held_bytes[device] if unused[device] else 0 for device in unused]
            self._num_bytes = min(room, default=0)


class Prefetcher:
    """Loads the active group's pieces as early as there is room, and lets them give way.

    Args:
        setting: As in `HiFTConfig`.
    """

    def __init__(self, setting: PrefetchBytes) -> None:
        self._setting = setting
        self.slots: dict[torch.device, DeviceSlots] = {}
        """By device; made when its first group's state is."""
        self._budget: PrefetchBudget | None = None

    def slots_of(self, device: torch.device) -> DeviceSlots:
        """The slots of a device, which all groups on it share."""
        if device not in self.slots:
            self.slots[device] = DeviceSlots(device)
            has_room = has_own_memory(device) if self._setting == "auto" else self._setting > 0
            if self._budget is None and has_room:
                self._budget = PrefetchBudget(self._setting)
        return self.slots[device]

    def begin_forward(self, residency: ResidentGroup, group: int, inputs: Any) -> None:
        """Load as much ahead as a forward leaves room for.

        Args:
            residency: The active group's owner of state.
            group: Its index.
            inputs: Of the forward; None of one that does not train, to which all room is left.
        """
        if self._budget is not None:
            self.load_ahead(residency, self.room_in(group, inputs))

    def room_in(self, group: int, inputs: Any) -> int:
        """Bytes that a forward leaves for pieces; it is noted.

        Args:
            group: Index of the group whose turn it is.
            inputs: Of the forward; None of one that does not train.
        """
        return 0 if self._budget is None or inputs is None else self._budget.begin_forward(group, inputs)

    def load_ahead(self, residency: ResidentGroup, num_bytes: int) -> None:
        """Let pieces of the active group hold so many bytes, and begin to load them."""
        if any(num_bytes < slots.prefetch_bytes for slots in self.slots.values()):
            residency.release(num_bytes)  # which may add the slots of a group that has no state yet
        for slots in self.slots.values():
            slots.prefetch_bytes = num_bytes
        if num_bytes:
            residency.prefetch()

    def note_lack_of_memory(self, residency: ResidentGroup) -> None:
        """Give up all that is held, and measure anew."""
        if self._budget is not None:
            self._budget.fail()
            self.load_ahead(residency, 0)

    def end_update(self, residency: ResidentGroup | None, *, ends_cycle: bool) -> None:
        """Begin to load what the next update steps.

        Args:
            residency: The owner of state of the group whose turn it is now; None where another is still to be stepped.
            ends_cycle: Whether every group has had its turn: then what is left is measured.
        """
        if self._budget is None:
            return
        if ends_cycle:
            self._budget.end_cycle(
                {device: slots.held_bytes for device, slots in self.slots.items() if has_own_memory(device)}
            )
        if residency is not None:
            self.load_ahead(residency, self._budget.num_bytes)
