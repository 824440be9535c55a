"""Host buffers for groups of `state="disk"`, and the thread that reads and writes their files.

    computing:  turn of 0          | turn of 1          | turn of 2
    buffer A:   0                  | write 0, read 2    | 2
    buffer B:   write 3, read 1    | 1                  | write 1, read 3

The caller chooses the group of a buffer. The thread makes one exchange at a time.
"""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import aligned, claimed_host_memory, tensor_at
from slivertune.core.ledger import claim
from slivertune.hift.config import HiFTConfig
from slivertune.hift.group_file import GroupFile, make_files
from slivertune.hift.parts import Part, Turn

NUM_BUFFERS = 2
"""Groups in host memory: the active group, and the previous group until it is written, then the next."""


@dataclass(slots=True, eq=False)
class _HostBuffer:
    """Host memory for the largest group."""

    memory: torch.Tensor
    streams: CopyStreams
    file: GroupFile | None = None
    """File whose group the buffer holds, or gets by `exchange`."""
    content: GroupFile | None = None
    """File whose group is in the buffer. Only the thread may change it until `exchange` has ended."""
    exchange: Future[None] | None = None
    """Exchange in flight, or ended and not checked yet."""


class Disk(Part):
    """Files of one optimizer's groups, and the two host buffers through which they pass.

    Args:
        config: HiFT's settings.
        sizes: Function that returns the bytes of each group, by index.
        coming: All groups in the order of their first turns.
    """

    def __init__(self, config: HiFTConfig, sizes: Callable[[], Sequence[int]], coming: Sequence[int]) -> None:
        self._config = config
        self._sizes = sizes
        self._coming = coming
        self.files: dict[int, GroupFile] | None = None
        """Files by group, None before `open`."""
        self._buffers: list[_HostBuffer] = []
        """Buffers, the last used at the end."""
        self._next: list[GroupFile] = []
        """Files of the next turns. The first keeps its buffer until its turn is over."""
        self._thread = ThreadPoolExecutor(1, "slivertune-disk")
        weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)

    def open(self) -> None:
        """Create the files, unless this was done before. Raises as `make_files`."""
        if self.files is None:
            sizes = self._sizes()
            on_disk = groups_on_disk(sizes, self._config.state_ram_bytes)
            self.files = make_files(Path(self._config.state_dir or "."), {index: sizes[index] for index in on_disk})
            self._expect(self._coming)

    @override
    def begin_turn(self, turn: Turn) -> None:
        self._coming = turn.coming
        self._expect(turn.coming)

    @override
    def check_step(self) -> None:
        """Retry failed exchanges. Raises OSError if one fails again, and at each call until it succeeds."""
        for buffer in self._buffers:
            if buffer.exchange is not None and buffer.exchange.done() and buffer.exchange.exception() is not None:
                self._begin_exchange(buffer, buffer.file).result()

    @override
    def after_save(self) -> None:
        self._expect(self._coming)

    @override
    def begin_load(self) -> None:
        self.open()
        self._expect(())

    def lend(self, group: int, streams: CopyStreams) -> "LentBuffer | None":
        """Lend a buffer to a group's new state, and forget its old state. Raises as `load`.

        Returns:
            The buffer, or None if the group has no file, since its state is stored in host memory.
        """
        assert self.files is not None, "no group has state before the files are made"
        if (file := self.files.get(group)) is None:
            return None
        if file.used_bytes:  # the thread may be writing it
            self._thread.submit(file.clear).result()
        return LentBuffer(self, file, streams)

    def _expect(self, coming: Sequence[int]) -> None:
        """Write groups that are not needed soon, and read those that are, given all in the order of their turns."""
        files = self.files or {}
        self._next = [files[group] for group in coming if group in files][:NUM_BUFFERS]
        missing = [file for file in self._next if all(buffer.file is not file for buffer in self._buffers)]
        for buffer in sorted(self._buffers, key=lambda each: each.file is not None):
            if buffer.file not in self._next:
                self._begin_exchange(buffer, missing.pop(0) if missing else None)

    def is_loaded(self, file: GroupFile) -> bool:
        """Return whether a group is in host memory, and start to load it if not."""
        exchange = self._buffer_of(file).exchange
        return exchange is None or (exchange.done() and exchange.exception() is None)

    def load(self, file: GroupFile, streams: CopyStreams) -> torch.Tensor:
        """Wait until a group is in host memory, and return it as uint8, valid until others are loaded.

        Raises:
            OSError: If it can't be read, or the group in its buffer can't be written.
        """
        if not self._buffers or self._buffers[0].streams.device.type != streams.device.type:
            self._make_buffers(streams)
        while (buffer := self._buffer_of(file)).exchange is not None:
            self._end_exchange(buffer)
        buffer.streams = streams
        return buffer.memory

    def write(self, file: GroupFile) -> None:
        """Wait until a group in host memory is written to its file. Raises OSError if this fails."""
        buffer = self._buffer_of(file)
        self._begin_exchange(buffer, file)
        self._end_exchange(buffer)

    def _make_buffers(self, streams: CopyStreams) -> None:
        for buffer in self._buffers:  # pinned for the model's previous device
            self._begin_exchange(buffer, None)
            self._end_exchange(buffer)
        sizes = [file.num_bytes for file in (self.files or {}).values()]
        self._buffers = [
            _HostBuffer(claimed_host_memory(streams, max(sizes), "state"), streams) for _ in sizes[:NUM_BUFFERS]
        ]

    def _buffer_of(self, file: GroupFile) -> _HostBuffer:
        """Return a group's buffer. If it has none, assign it the buffer whose group is needed last."""
        buffer = next((each for each in self._buffers if each.file is file), None)
        if buffer is None:
            buffer = max(self._buffers, key=lambda each: (*self._next, each.file).index(each.file))
        if buffer.file is not file or (buffer.exchange is None and buffer.content is not file):
            self._begin_exchange(buffer, file)
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _begin_exchange(self, buffer: _HostBuffer, file: GroupFile | None) -> Future[None]:
        copied = [buffer.streams.record(direction) for direction in ("inbound", "outbound")]
        buffer.file = file
        buffer.exchange = self._thread.submit(_exchange, buffer, copied, file)
        return buffer.exchange

    def _end_exchange(self, buffer: _HostBuffer) -> None:
        assert buffer.exchange is not None
        try:
            buffer.exchange.result()
        finally:
            if buffer.exchange.done():  # else Ctrl-C has ended the wait
                buffer.file, buffer.exchange = buffer.content, None


def _exchange(buffer: _HostBuffer, copied: Sequence[Event], file: GroupFile | None) -> None:
    """Write the group in a buffer, once its copies have ended, and read another one into it."""
    for event in copied:
        buffer.streams.wait_on_host(event)
    if buffer.content is not None:
        buffer.content.write(buffer.memory)
    if buffer.content is not file:
        buffer.content = None
        if file is not None:
            file.read(buffer.memory)
        buffer.content = file


class LentBuffer:
    """Tensors of one group, which are in a buffer of the disk during its turn, and in its file between turns."""

    def __init__(self, disk: Disk, file: GroupFile, streams: CopyStreams) -> None:
        self._disk, self._file, self._streams = disk, file, streams
        self._memory = disk.load(file, streams)

    def empty_like(self, model: torch.Tensor) -> torch.Tensor | None:
        """Return a new tensor with arbitrary content, or None if the file has no room for it."""
        start, num_bytes = self._file.used_bytes, aligned(model.nbytes)
        if start + num_bytes > self._file.num_bytes:
            return None
        self._file.used_bytes += num_bytes
        return tensor_at(self._memory, start, model)

    @property
    def is_loaded(self) -> bool:
        """Whether the tensors are in host memory now, so that `load` does not wait."""
        return self._disk.is_loaded(self._file)

    def load(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Wait until the tensors are in host memory, and return the function that finds one there by its old place.

        Returns:
            The function, or None if the tensors are where they were.

        Raises:
            OSError: If they can't be read.
        """
        before, self._memory = self._memory, self._disk.load(self._file, self._streams)
        if self._memory is before:
            return None

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            start = _place(tensor, before)
            return tensor if start is None else tensor_at(self._memory, start, tensor)

        return moved

    def lasting(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Write the tensors, and return the function that makes one readable when other groups' are loaded.

        Raises:
            OSError: If they can't be written.
        """
        self._disk.write(self._file)
        mapping = self._file.map()

        def lasting(tensor: torch.Tensor) -> torch.Tensor:
            if (start := _place(tensor, self._memory)) is None:
                return tensor
            # Each has a storage of its own: torch.save refuses several dtypes in one.
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=tensor.nbytes, offset=start)
            claim(flat, "state", "disk")
            return tensor_at(flat, 0, tensor)

        return lasting


def _place(tensor: torch.Tensor, memory: torch.Tensor) -> int | None:
    """Return the first byte of a tensor in some memory, or None if it is not there."""
    start = tensor.data_ptr() - memory.data_ptr()
    return start if tensor.nbytes and 0 <= start < memory.numel() else None


def groups_on_disk(sizes: Sequence[int], ram_bytes: int) -> list[int]:
    """Choose the groups that are stored in files. The smallest stay in host memory, as many as fit."""
    # The choice is fixed: every group is needed once per cycle, so a cache of recent groups evicts each before its use.
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index])
    totals = accumulate(sizes[index] for index in smallest_first)
    return sorted(index for index, total in zip(smallest_first, totals, strict=True) if total > ram_bytes)


def split_bytes(sizes: Sequence[int], ram_bytes: int) -> tuple[int, int]:
    """Return the bytes of host memory (buffers included) and of files that groups of these sizes take."""
    on_disk = [sizes[index] for index in groups_on_disk(sizes, ram_bytes)]
    return sum(sizes) - sum(on_disk) + min(NUM_BUFFERS, len(on_disk)) * max(on_disk, default=0), sum(on_disk)
