"""Side streams of a device, on which copies overlap with its computation.

All copies of offloaded tensors go through one object of this kind. A test or a plan that replaces it
(`streams_made_by`) therefore sees their order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from slivertune.core.maker import Maker
from slivertune.core.pinned_memory import pinned_memory

Direction = Literal["inbound", "outbound"]
"""Direction of a copy, into the device or out of it."""
Event = Any
"""Point in a stream. None if the device has no streams."""


class CopyStreams:
    """Two side streams of one device. On a device without streams, everything runs in program order.

    Args:
        device: The computing device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Computing device."""
        self._streams: dict[Direction, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, direction: Direction, *after: Event) -> Iterator[None]:
        """Queue the work inside on a side stream, to start after these events."""
        if self.device.type != "cuda":
            yield
            return
        stream = self._stream(direction)
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def record(self, direction: Direction | None = None) -> Event:
        """Record an event behind the work queued so far on a side stream (None: the computing stream)."""
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.device) if direction is None else self._stream(direction)
        return stream.record_event()

    def compute_after(self, event: Event) -> None:
        """Let later work of the computing stream start after an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        """Wait on the host for an event. Any thread may call this."""
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        """Wait on the host until both side streams are empty."""
        for stream in self._streams.values():
            stream.synchronize()

    def host_memory(self, num_bytes: int, *, is_inherited: bool = False) -> torch.Tensor:
        """Allocate host memory. For a CUDA device it is pinned, so that copies overlap with computation.

        Args:
            num_bytes: Size in bytes.
            is_inherited: Whether forked processes, such as a data loader's workers, may read it.

        Returns:
            Uninitialized uint8 tensor, shape (num_bytes,).
        """
        if self.device.type != "cuda" or num_bytes == 0:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return pinned_memory(self.device, num_bytes, is_inherited=is_inherited)

    def _stream(self, direction: Direction) -> torch.cuda.Stream:
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self.device)
        return self._streams[direction]


copy_streams = Maker(CopyStreams)
"""Factory of copy streams. It takes a device."""

streams_made_by = copy_streams.replaced_by
"""Context manager in which another factory makes the copy streams. It takes that factory."""
