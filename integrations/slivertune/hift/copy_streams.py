"""Two side streams on CUDA, one into the device and one out of it; plain order elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Direction = Literal["inbound", "outbound"]
Event = torch.cuda.Event | None
"""A moment on a stream; None where there are no streams."""


class CopyStreams:
    """The side streams of one device.

    Args:
        device: A CUDA device gets real streams; on any other, work runs where it stands.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {"inbound": torch.cuda.Stream(device), "outbound": torch.cuda.Stream(device)}

    @contextmanager
    def on(self, direction: Direction, *after: Event) -> Iterator[None]:
        """Queue what is done inside on `direction`, to start after these moments."""
        if not self._streams:
            yield
            return
        stream = self._streams[direction]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def record(self, direction: Direction | None = None) -> Event:
        """The moment at which what is queued now on `direction` (None: the computing stream) is done."""
        if not self._streams:
            return None
        stream = torch.cuda.current_stream(self._device) if direction is None else self._streams[direction]
        event: torch.cuda.Event = stream.record_event()
        return event

    def compute_after(self, event: Event) -> None:
        """Let later work of the computing stream start after `event`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Wait on the host until both streams are empty."""
        for stream in self._streams.values():
            stream.synchronize()
