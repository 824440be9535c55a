"""Device memory through which offloaded state passes, chunk by chunk.

A slot holds one chunk: from the moment its load is queued, through its step, until it is written back. Only the next
user of the slot's memory waits for that copy: the next load into the slot or, if it is given up, the computation that
gets its memory.
"""

import weakref
from dataclasses import dataclass

import torch

from slivertune.core.copy_streams import CopyStreams, Event, copy_streams
from slivertune.core.ledger import claim, claimed_at_birth


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory for one chunk."""

    memory: torch.Tensor
    """Bytes of the slot, uint8, one dimension."""
    free_after: Event
    """Event after which the memory may be written."""


class DeviceSlots:
    """Slots of one device, which all groups share, and the streams that fill and empty them.

    Args:
        device: Device of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: CopyStreams = copy_streams(device)
        """Streams that load chunks and write them back."""
        self.prefetch_bytes = 0
        """Bytes that slots may hold outside of a group's own backward and step, and that stay allocated."""
        self.held_bytes = 0
        """Bytes allocated for slots."""
        self._free: list[Slot] = []
        self._num_taken = 0
        # The optimizer may be dropped right after a step, with copies out of this memory in flight.
        weakref.finalize(self, self.streams.synchronize).atexit = False

    def take(self, num_bytes: int, at_least: int) -> Slot | None:
        """Take the slot that was freed first. The first load into it must wait for `free_after`.

        Args:
            num_bytes: Bytes that must fit.
            at_least: Number of slots that may be in use whatever `prefetch_bytes` is.

        Returns:
            Slot, or None if there is no room for another.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for one of the `at_least` slots.
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
        """Return a slot to the free ones.

        Args:
            slot: Slot to return.
            free_after: Event after which its memory may be written.
        """
        slot.free_after = free_after
        self._num_taken -= 1
        self._free.append(slot)

    def shrink(self, to_bytes: int | None = None) -> None:
        """Drop free slots until all slots hold at most `to_bytes` bytes, or `prefetch_bytes` if it is None."""
        limit = self.prefetch_bytes if to_bytes is None else to_bytes
        while self._free and self.held_bytes > limit:
            self._give_up(self._free.pop(0))

    def _allocate(self, num_bytes: int, *, needed: bool) -> Slot | None:
        try:
            memory = self._new_memory(num_bytes)
        except torch.OutOfMemoryError:
            # Prefetched chunks must not cause this error: stop prefetching.
            self.prefetch_bytes = 0
            self.shrink()
            if not needed:
                return None
            memory = self._new_memory(num_bytes)
        self.held_bytes += num_bytes
        # Earlier computation may still use this memory.
        return Slot(memory, self.streams.record())

    def _new_memory(self, num_bytes: int) -> torch.Tensor:
        with claimed_at_birth("state"):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.streams.device)
        claim(memory, "state")
        return memory

    def _give_up(self, slot: Slot) -> None:
        self.held_bytes -= slot.memory.numel()
        self.streams.compute_after(slot.free_after)
