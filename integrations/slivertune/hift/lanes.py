"""Two side streams on CUDA, one into the device and one out of it; plain order elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Lane = Literal["inbound", "outbound"]
Mark = torch.cuda.Event | None
"""A moment on a stream; None where there are no streams."""


class Lanes:
    """The side streams of one device.

    Args:
        device: A CUDA device gets real streams; on any other, work runs where it stands.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {"inbound": torch.cuda.Stream(device), "outbound": torch.cuda.Stream(device)}

    @contextmanager
    def on(self, lane: Lane, *after: Mark) -> Iterator[None]:
        """Queue what is done inside on `lane`, to start after these moments."""
        if not self._streams:
            yield
            return
        stream = self._streams[lane]
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            yield

    def mark(self, lane: Lane | None = None) -> Mark:
        """The moment at which what is queued now on `lane` (None: the computing stream) is done."""
        if not self._streams:
            return None
        stream = torch.cuda.current_stream(self._device) if lane is None else self._streams[lane]
        event: torch.cuda.Event = stream.record_event()
        return event

    def compute_after(self, mark: Mark) -> None:
        """Let later work of the computing stream start after `mark`."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self) -> None:
        """Wait on the host until both lanes are empty."""
        for stream in self._streams.values():
            stream.synchronize()
