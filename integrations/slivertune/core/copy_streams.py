"""Side streams of a device, on which copies run beside its computation.

All copies of waiting tensors go through one object of this kind, so that a test or a plan that stands in for it
(`streams_made_by`) sees their order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from slivertune.core.maker import Maker
from slivertune.core.pinned_memory import pinned_memory

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
        stream = self._stream(direction)
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def record(self, direction: Direction | None = None) -> Event:
        """The moment at which what is queued now on a side stream (None: the computing stream) is done."""
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.device) if direction is None else self._stream(direction)
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

    def host_memory(self, num_bytes: int, *, is_inherited: bool = False) -> torch.Tensor:
        """Allocate host memory, pinned where the device is a CUDA device, so that copies run beside the computation.

        Args:
            num_bytes: Of the memory.
            is_inherited: Whether processes forked off this one, such as a data loader's workers, may read it.

        Returns:
            uint8, shape (num_bytes,), of arbitrary content.
        """
        if self.device.type != "cuda" or num_bytes == 0:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return pinned_memory(self.device, num_bytes, is_inherited=is_inherited)

    def _stream(self, direction: Direction) -> torch.cuda.Stream:
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self.device)
        return self._streams[direction]


copy_streams = Maker(CopyStreams)
"""Makes new copy streams, of a device."""

streams_made_by = copy_streams.replaced_by
"""Lets something else stand in for the copy streams that are made meanwhile; takes what makes it, of a device."""
