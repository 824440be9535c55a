"""Side streams of a device, on which copies run beside its computation.

All copies of waiting tensors go through one object of this kind, so that a test or a simulator that stands in for it
(`streams_made_by`) sees their order. What files hold goes through `hift/disk.py`, which is made likewise.
"""

import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from slivertune.core.maker import Maker

Direction = Literal["inbound", "outbound"]
"""Into the device, or out of it."""
Event = Any
"""A moment on a stream; None where there are no streams."""


class CopyStreams:
    """Two side streams of one device. Where a device has none, everything runs in plain order.

    Args:
        device: Where the computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where the computation runs."""
        self._streams: dict[Direction, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, direction: Direction, *after: Event) -> Iterator[None]:
        """Queue what is done inside on a side stream, to start after these moments."""
        if self.device.type != "cuda":
            yield
            return
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self.device)
        stream = self._streams[direction]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def record(self, direction: Direction | None = None) -> Event:
        """The moment at which what is queued now on a side stream (None: the computing stream) is done."""
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.device) if direction is None else self._streams[direction]
        return stream.record_event()

    def compute_after(self, event: Event) -> None:
        """Let later work of the computing stream start after a moment."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        """Wait on the host for a moment; any thread may."""
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        """Wait on the host until both side streams are empty."""
        for stream in self._streams.values():
            stream.synchronize()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host, pinned where the device is a CUDA device, so that copies run beside the computation.

        Args:
            num_bytes: How many.

        Returns:
            uint8, shape (num_bytes,), of arbitrary content.

        Raises:
            RuntimeError: If it can't be pinned.
        """
        if self.device.type != "cuda" or num_bytes == 0:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return _pinned(self.device, num_bytes)


def _pinned(device: torch.device, num_bytes: int) -> torch.Tensor:
    # torch's own pinned allocator rounds up to a power of two, which can nearly double 80 GB of state. Whole pages, so
    # that no two registrations share one.
    room = torch.empty(num_bytes + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    start = -room.data_ptr() % mmap.PAGESIZE
    buffer = room[start : start + num_bytes]
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        pages_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), pages_bytes, 0))
        except RuntimeError as error:
            raise RuntimeError(
                f"{num_bytes:,} bytes of host memory for what waits off the device can't be pinned ({error}); free "
                'host memory, or use state="disk", which pins two groups at a time'
            ) from error
    weakref.finalize(room.untyped_storage(), _unpin, device, buffer.data_ptr()).atexit = False
    return buffer


def _unpin(device: torch.device, address: int) -> None:
    # The optimizer may be dropped right after a step, with copies on their way into this memory.
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


copy_streams = Maker(CopyStreams)
"""Makes new copy streams, of a device."""

streams_made_by = copy_streams.replaced_by
"""Lets something else stand in for the copy streams that are made meanwhile; takes what makes it, of a device."""
