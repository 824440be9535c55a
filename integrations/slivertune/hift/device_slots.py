"""The memory of the device through which what waits on the host passes, piece by piece.

A slot holds one piece: from the moment its load is queued, through its step, until its copy back has left. Nothing
waits for that copy but who uses the slot's memory next: the next load into it, or, where the slot is given up, the
computation that gets its memory.
"""

import weakref
from dataclasses import dataclass

import torch

from slivertune.core.copy_streams import CopyStreams, Event, copy_streams
from slivertune.core.ledger import claim, claimed_at_birth


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one piece."""

    memory: torch.Tensor
    """uint8, one dimension."""
    free_after: Event
    """The moment from which the memory may be written."""


class DeviceSlots:
    """The slots of one device, which all groups share, and the streams that fill and empty them.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: CopyStreams = copy_streams(device)
        """On which pieces come and leave."""
        self.prefetch_bytes = 0
        """What slots may hold outside of a group's own backward and step; also what stays allocated there."""
        self.held_bytes = 0
        """What is allocated for slots."""
        self._free: list[Slot] = []
        self._num_taken = 0
        # The optimizer may be dropped right after a step, with copies out of this memory on their way.
        weakref.finalize(self, self.streams.synchronize).atexit = False

    def take(self, num_bytes: int, at_least: int) -> Slot | None:
        """Take a slot, the one that was freed first; the first load into it has to wait for `free_after`.

        Args:
            num_bytes: Bytes that must fit.
            at_least: So many slots may be in use whatever `prefetch_bytes` says.

        Returns:
            The slot; None where there is no room for another.

        Raises:
            torch.OutOfMemoryError: If the device has none for one of the `at_least` slots.
        """
        found = next((slot for slot in self._free if slot.memory.numel() >= num_bytes), None)
        if found is None:
            while self._free and self.held_bytes + num_bytes > self.prefetch_bytes:
                self._give_up(self._free.pop(0))
            needed = self._num_taken < at_least
            if not needed and self.held_bytes + num_bytes > self.prefetch_bytes:
                return None
            found = self._allocate(num_bytes, needed=needed)
            if found is None:
                return None
        else:
            self._free.remove(found)
        self._num_taken += 1
        return found

    def give_back(self, slot: Slot, free_after: Event) -> None:
        """Let others use a slot.

        Args:
            slot: The slot.
            free_after: The moment from which its memory may be written.
        """
        slot.free_after = free_after
        self._num_taken -= 1
        self._free.append(slot)

    def shrink(self, to_bytes: int | None = None) -> None:
        """Give up free slots until all slots hold no more than so many bytes; None: than `prefetch_bytes`."""
        limit = self.prefetch_bytes if to_bytes is None else to_bytes
        while self._free and self.held_bytes > limit:
            self._give_up(self._free.pop(0))

    def _allocate(self, num_bytes: int, *, needed: bool) -> Slot | None:
        try:
            memory = self._new_memory(num_bytes)
        except torch.OutOfMemoryError:
            # What is held ahead of its time gives way.
            self.prefetch_bytes = 0
            self.shrink()
            if not needed:
                return None
            memory = self._new_memory(num_bytes)
        self.held_bytes += num_bytes
        # The computation may still be using what lay here before.
        return Slot(memory, self.streams.record())

    def _new_memory(self, num_bytes: int) -> torch.Tensor:
        with claimed_at_birth("state"):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.streams.device)
        claim(memory, "state")
        return memory

    def _give_up(self, slot: Slot) -> None:
        self.held_bytes -= slot.memory.numel()
        self.streams.compute_after(slot.free_after)
