"""Offload activations to host memory from the forward to the backward.

A copy leaves on a side stream during the forward that comes after it. In the backward, the next activation is
prefetched while the last one is in use. The memory on the host is kept for later steps, since registering pages with
the driver takes longer than a copy.
"""

import weakref

import torch

from slivertune.core.copy_streams import CopyStreams, Event, copy_streams
from slivertune.core.host_memory import available_host_bytes
from slivertune.core.host_tensors import claimed_host_memory, tensor_at
from slivertune.core.torch_internals import is_without_data


class WaitingActivation:
    """One tensor in host memory, until this object dies. The graph holds the object."""

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: "_Record") -> None:
        self.record = record


class WaitingActivations:
    """Owns host memory for one device's activations, and the copies in both directions.

    Args:
        device: Device that computes the activations.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: CopyStreams = copy_streams(device)
        self._free: list[torch.Tensor] = []
        self._leaving: list[tuple[Event, torch.Tensor]] = []
        self._waiting: weakref.WeakValueDictionary[int, WaitingActivation] = weakref.WeakValueDictionary()
        self._num_stored = 0

    def store(self, tensor: torch.Tensor, place: int) -> WaitingActivation:
        """Begin to copy a tensor to the host. It stays on the device as well, until `settle`.

        Args:
            tensor: The activation.
            place: Index of the block whose input it is. The backward asks for the blocks from the top to the bottom.

        Raises:
            MemoryError: If the host has no room for it.
        """
        buffer = self._take(tensor.nbytes)
        host = tensor_at(buffer, 0, tensor)
        # The computing stream has waited for every load from this buffer.
        with self._streams.on("outbound", self._streams.record()):
            host.copy_(tensor, non_blocking=True)
            stored = self._streams.record("outbound")
        self._leaving.append((stored, tensor))
        self._num_stored += 1
        record = _Record(self._num_stored, place, host, stored, buffer)
        waiting = WaitingActivation(record)
        weakref.finalize(waiting, self._end, record).atexit = False
        self._waiting[record.number] = waiting
        return waiting

    def settle(self) -> None:
        """Release the device tensors whose copies are in flight. Later computation runs after these copies."""
        while self._leaving:
            event, _ = self._leaving.pop()
            self._streams.compute_after(event)

    def load(self, waiting: WaitingActivation) -> torch.Tensor:
        """Load a tensor back, and prefetch the tensor of the block below.

        Args:
            waiting: Result of `store`.
        """
        record = waiting.record
        self._begin_load(record)
        assert record.loading is not None
        tensor, loaded = record.loading
        record.loading = None
        self._streams.compute_after(loaded)
        below = [each.record for each in self._waiting.values() if each.record.number < record.number]
        # The tensor stored before may be of another forward, whose turn has not come.
        if below and below[-1].place < record.place:
            self._begin_load(below[-1])
        return tensor

    def _begin_load(self, record: "_Record") -> None:
        if record.loading is not None:
            return
        # Allocated on the computing stream, so that work queued there is done with the memory.
        tensor = torch.empty_strided(
            record.host.shape, record.host.stride(), dtype=record.host.dtype, device=self._streams.device
        )
        with self._streams.on("inbound", self._streams.record(), record.stored):
            tensor.copy_(record.host, non_blocking=True)
            loaded = self._streams.record("inbound")
        record.loading = tensor, loaded

    def _end(self, record: "_Record") -> None:
        if record.loading is not None:
            self._streams.compute_after(record.loading[1])
        self._free.append(record.buffer)

    def _take(self, num_bytes: int) -> torch.Tensor:
        self._free.sort(key=lambda each: each.nbytes)
        place = next((place for place, each in enumerate(self._free) if each.nbytes >= num_bytes), None)
        if place is not None:
            return self._free.pop(place)
        if self._free:
            self._free.pop()  # sequences have become longer, so a larger buffer takes its place
        return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        free = None if is_without_data() else available_host_bytes()
        if free is not None and num_bytes > free:
            raise MemoryError(
                f"a block's input takes {num_bytes:,} bytes, and the host has {free:,} left for offloaded activations. "
                "Use shorter or fewer sequences, or leave offload_activations out"
            )
        return claimed_host_memory(self._streams, num_bytes, "activations")


class _Record:
    """Bookkeeping of an offloaded activation."""

    __slots__ = ("buffer", "host", "loading", "number", "place", "stored")

    def __init__(self, number: int, place: int, host: torch.Tensor, stored: Event, buffer: torch.Tensor) -> None:
        self.number, self.place, self.host, self.stored, self.buffer = number, place, host, stored, buffer
        self.loading: tuple[torch.Tensor, Event] | None = None
        """Tensor on the device, and the event of its arrival there."""
