"""Device memory through which offloaded state passes, chunk by chunk.

A slot is memory for one chunk: from the moment its load is queued, through its step, until it is written back. Only the
next user of the memory waits for that copy: the next load into it or, if it is given up, the computation that gets it.
"""

import weakref

import torch

from slivertune.core.copy_streams import CopyStreams, Event, copy_streams
from slivertune.core.ledger import claim, claimed_at_birth


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
        self._free: list[tuple[torch.Tensor, Event]] = []
        """Free memory, and the event after which each may be written."""
        self._num_taken = 0
        # The optimizer may be dropped right after a step, with copies out of this memory in flight.
        weakref.finalize(self, self.streams.synchronize).atexit = False

    def take(self, num_bytes: int, at_least: int) -> tuple[torch.Tensor, Event] | None:
        """Take the slot that was freed first.

        Args:
            num_bytes: Bytes that must fit.
            at_least: Number of slots that may be in use whatever `prefetch_bytes` is.

        Returns:
            Memory (uint8, one dimension) and the event after which it may be written. None without room for another.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for one of the `at_least` slots.
        """
        for place, (memory, _) in enumerate(self._free):
            if memory.numel() >= num_bytes:
                self._num_taken += 1
                return self._free.pop(place)
        self.shrink(self.prefetch_bytes - num_bytes)
        needed = self._num_taken < at_least
        if not needed and self.held_bytes + num_bytes > self.prefetch_bytes:
            return None
        made = self._allocate(num_bytes, needed=needed)
        self._num_taken += made is not None
        return made

    def give_back(self, memory: torch.Tensor, free_after: Event) -> None:
        """Return the memory of a slot, given the event after which it may be written."""
        self._num_taken -= 1
        self._free.append((memory, free_after))

    def shrink(self, to_bytes: int | None = None) -> None:
        """Drop free slots until all slots hold at most `to_bytes` bytes, or `prefetch_bytes` if it is None."""
        limit = self.prefetch_bytes if to_bytes is None else to_bytes
        while self._free and self.held_bytes > limit:
            memory, free_after = self._free.pop(0)
            self.held_bytes -= memory.numel()
            self.streams.compute_after(free_after)

    def _allocate(self, num_bytes: int, *, needed: bool) -> tuple[torch.Tensor, Event] | None:
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
        return memory, self.streams.record()

    def _new_memory(self, num_bytes: int) -> torch.Tensor:
        with claimed_at_birth("state"):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.streams.device)
        claim(memory, "state")
        return memory
