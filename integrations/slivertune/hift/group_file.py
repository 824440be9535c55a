"""What a store of files knows of each group: its file, and the host memory that holds its state now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.direct_files import PAGE_BYTES, in_pages
from slivertune.core.host_tensors import claimed_host_memory
from slivertune.core.ledger import FileBytes
from slivertune.hift.group_image import GroupImage


class HostBuffer:
    """Host memory for one group, in whole pages."""

    def __init__(self, streams: CopyStreams, num_bytes: int) -> None:
        self.streams = streams
        whole = claimed_host_memory(streams, in_pages(num_bytes) + PAGE_BYTES, "state")
        start = -whole.data_ptr() % PAGE_BYTES
        self.memory: torch.Tensor = whole[start : start + in_pages(num_bytes)]
        self.holder: GroupFile | None = None
        self.read_until: Event = None
        """When copies to the device, of what is here beside the steps, have ended."""
        self.written_until: Event = None
        """When what was here is in its file."""


@dataclass(slots=True, eq=False)
class GroupFile:
    """One group's file. The fields are the store's."""

    path: Path
    size: FileBytes = field(default_factory=FileBytes)
    """Counts it in the ledger."""
    buffer: HostBuffer | None = None
    """Has what the file has, or something newer."""
    written: GroupImage | None = None
    """What the file holds; None of one that is not there."""
    unwritten: GroupImage | None = None
    """What the buffer holds, if the file has to be written."""
    must_be_written: bool = False
    """Now, and not only when its turn is over."""
    is_in_use: bool = False
    """Its group is being stepped in the buffer."""
    is_moving: bool = False
    """A thread reads or writes it."""
    failure: Exception | None = None
    """Of the last read or write."""
    arrived: Event = None
    """When what was read is in the buffer."""
    left: Event = None
    """When the file has what was written."""
    stored: Sequence[Event] = ()
    """Moments at which what is unwritten has arrived in the buffer."""

    @property
    def is_spare(self) -> bool:
        """Whether the file has all that the buffer has, and nobody is at work on it."""
        return not self.is_in_use and not self.is_moving and self.unwritten is None and self.written is not None
