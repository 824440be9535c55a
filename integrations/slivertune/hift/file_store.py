"""Files of groups' state, read ahead of a turn and written behind it by two threads, through a few buffers of the host.

    reader:     read 1           |          read 2            |          read 3
    computing:  turn of 0        | turn of 1                  | turn of 2
    writer:                      | write 0                    | write 1

A file is always written anew under another name and then renamed, so that it is whole at every moment, and what links
to an older one keeps that. All that the threads share is guarded by one lock. Who reads and writes is `hift/disk.py`;
here is decided what, when and through which buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path

import torch

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.hift.disk import disk_of
from slivertune.hift.group_file import GroupFile, HostBuffer
from slivertune.hift.group_image import GroupImage, Name

NUM_BUFFERS = 2
"""Groups in host memory: the one whose turn it is, and the last one until it is written, then the next."""
_NAME = "hift"
"""Begins the hidden folder's name."""


class FileStore:
    """The files of one optimizer, in a hidden folder that is removed with it; of killed processes, by the next store.

    Args:
        directory: Where the folder is made.
        num_buffers: Groups in host memory at a time.
        buffer_bytes: Of the largest group.
        needs_bytes: What all files, and one more of the largest, will take.

    Raises:
        OSError: If there is no room, or the folder can't be made; names it.
    """

    def __init__(self, directory: Path, *, num_buffers: int, buffer_bytes: int, needs_bytes: int) -> None:
        self._num_buffers, self._buffer_bytes = num_buffers, buffer_bytes
        self._files: list[GroupFile] = []
        self._buffers: list[HostBuffer] = []
        self._expected: tuple[GroupFile, ...] = ()
        self._disk = disk_of(directory / _NAME, needs_bytes)
        self._changed = self._disk.changed
        self._disk.start(reader=(self._next_to_read, self._read), writer=(self._next_to_write, self._write))

    def add(self, index: int) -> GroupFile:
        """A group's file, which is not there yet.

        Args:
            index: Of the group.
        """
        file = GroupFile(self._disk.path(f"group-{index:05d}.safetensors"))
        with self._changed:
            self._files.append(file)
        return file

    def expect(self, files: Iterable[GroupFile]) -> None:
        """Say whose turns come next, the nearest first: they are read, and not written before their turn is over."""
        with self._changed:
            self._expected = tuple(files)[: self._num_buffers]
            self._changed.notify_all()

    def check(self) -> None:
        """Try again what could not be written.

        Raises:
            OSError: If it still can't be: the file has the older state then, and the buffer the newer one.
        """
        with self._changed:
            failed = [file for file in self._files if file.failure is not None and file.unwritten is not None]
            for file in failed:
                self._ask_for_writing(file)
            for file in failed:
                self._wait_until_written(file)

    def lend(self, file: GroupFile, streams: CopyStreams) -> torch.Tensor:
        """Memory for a group without state; it is used until `hand_over`.

        Args:
            file: Its file to be.
            streams: Will copy to and from it.

        Returns:
            uint8, of arbitrary content.

        Raises:
            OSError: If what a buffer holds can't be written.
        """
        with self._changed:
            buffer = self._wait_for_buffer(streams)
            buffer.holder, file.buffer, file.is_in_use = file, buffer, True
            return buffer.memory

    def memory_of(self, file: GroupFile) -> torch.Tensor | None:
        """What a group's state lies in; None while it is not there."""
        with self._changed:
            if file.buffer is None or not self._disk.has_happened(file.arrived):
                return None
            return file.buffer.memory

    def use(self, file: GroupFile) -> torch.Tensor:
        """Have a group's state in memory, to be stepped: neither written nor given up until `hand_over`.

        Raises:
            OSError: If its file can't be read, or what is in its way can't be written.
        """
        with self._changed:
            memory = self.bring(file)
            file.is_in_use = True
            return memory

    def bring(self, file: GroupFile) -> torch.Tensor:
        """Have a group's state in memory, for as long as its turn is expected.

        Raises:
            OSError: If its file can't be read, or what is in its way can't be written.
        """
        with self._changed:
            if file.buffer is None:
                file.failure = None
                self._expected = (file, *(each for each in self._expected if each is not file))
                self._changed.notify_all()
                while file.buffer is None:
                    if file.failure is not None:
                        raise _again(file.failure)
                    if not self._make_way():
                        self._changed.wait()
            while file.is_moving:
                self._changed.wait()
            self._disk.wait_on_host(file.arrived)
            return file.buffer.memory

    def note_copy(self, file: GroupFile, ended: Event) -> None:
        """Keep what a group's buffer holds until a copy from it has ended.

        Args:
            file: The group's, in memory.
            ended: When that is.
        """
        with self._changed:
            assert file.buffer is not None
            file.buffer.read_until = ended

    def enlarge(self, file: GroupFile, num_bytes: int) -> torch.Tensor:
        """Other memory in place of a group's buffer, which has become too small; nothing is copied."""
        with self._changed:
            assert file.buffer is not None
            self._buffers.remove(file.buffer)
            file.buffer = self._new_buffer(file.buffer.streams, num_bytes)
            file.buffer.holder = file
            return file.buffer.memory

    def hand_over(self, file: GroupFile, image: GroupImage, stored: Sequence[Event]) -> None:
        """Say that a group's step is over: its state is written once its turn is.

        Args:
            file: The group's.
            image: What its buffer holds.
            stored: The moments at which all of that has arrived there.
        """
        with self._changed:
            file.unwritten, file.is_in_use, file.stored = image, False, stored
            self._changed.notify_all()
        file.size.num_bytes = image.file_bytes

    def settle(self, file: GroupFile) -> None:
        """Wait until a group's file holds its state.

        Raises:
            OSError: If it can't be written.
        """
        with self._changed:
            if file.unwritten is not None:
                self._ask_for_writing(file)
                self._wait_until_written(file)

    def forget(self, file: GroupFile) -> None:
        """Give up a group's state, in memory and in its file."""
        with self._changed:
            while file.is_moving:
                self._changed.wait()
            if file.buffer is not None:
                file.buffer.holder = None
            if file.written is not None:
                self._disk.remove(file.path, file.written)
            file.buffer = file.written = file.unwritten = file.failure = None
            file.is_in_use = file.must_be_written = False
            self._changed.notify_all()
        file.size.num_bytes = 0

    def mapped(self, file: GroupFile, models: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Tensors of a group's file, which stay as they are when it is written again; after `settle`.

        Args:
            file: The group's.
            models: What each tensor is like.
        """
        return self._disk.mapped(file.path, models)

    def close(self) -> None:
        """End the threads, and remove all files."""
        self._disk.close()

    # With the lock held.

    def _ask_for_writing(self, file: GroupFile) -> None:
        file.failure, file.must_be_written = None, True
        self._changed.notify_all()

    def _wait_until_written(self, file: GroupFile) -> None:
        while file.unwritten is not None:
            if file.failure is not None:
                raise _again(file.failure)
            self._changed.wait()
        self._disk.wait_on_host(file.left)

    def _wait_for_buffer(self, streams: CopyStreams) -> HostBuffer:
        """A buffer that nobody holds."""
        while True:
            if len(self._buffers) < self._num_buffers:
                return self._new_buffer(streams, self._buffer_bytes)
            for buffer in self._buffers:
                if self._is_free(buffer):
                    _empty(buffer)
                    if buffer.streams is streams:
                        return buffer
                    self._buffers.remove(buffer)  # the model has moved
                    return self._new_buffer(streams, self._buffer_bytes)
            if not self._make_way():
                self._changed.wait()

    def _make_way(self) -> bool:
        """Let a buffer become free, where nothing that goes on by itself frees one; whether anything has changed.

        Raises:
            OSError: If what a buffer holds could not be written.
        """
        if any(file.is_moving for file in self._files) or self._can_read() or self._can_write():
            return False
        for buffer in self._buffers:
            holder = buffer.holder
            if holder is not None and holder.failure is not None and holder.unwritten is not None:
                raise _again(holder.failure)
        waiting = [each for each in self._expected[1:] if each.buffer is not None and not each.is_in_use]
        # What was read ahead is read again; a group whose buffers have all become too small gets one of its own.
        self._expected = tuple(each for each in self._expected if each not in waiting)
        if not waiting:
            sizes = [file.written.num_bytes for file in self._files if file.written is not None]
            self._new_buffer(self._buffers[0].streams, max([self._buffer_bytes, *sizes]))
        self._changed.notify_all()
        return True

    def _new_buffer(self, streams: CopyStreams, num_bytes: int) -> HostBuffer:
        buffer = HostBuffer(streams, num_bytes)
        self._buffers.append(buffer)
        return buffer

    def _is_free(self, buffer: HostBuffer) -> bool:
        return buffer.holder is None or (buffer.holder.is_spare and buffer.holder not in self._expected)

    def _can_read(self) -> tuple[GroupFile, HostBuffer] | None:
        for file in self._expected:
            if file.buffer is None and file.written is not None and not file.is_moving and file.failure is None:
                size = file.written.num_bytes
                fitting = (each for each in self._buffers if self._is_free(each) and each.memory.numel() >= size)
                return next(((file, each) for each in fitting), None)
        return None

    def _can_write(self) -> GroupFile | None:
        for file in self._files:
            if file.unwritten is None or file.is_in_use or file.is_moving or file.failure is not None:
                continue
            if file.must_be_written or file not in self._expected:
                return file
        return None

    # The threads.

    def _next_to_read(self) -> tuple[GroupFile, HostBuffer] | None:
        found = self._can_read()
        if found is None:
            return None
        file, buffer = found
        # Copies from it that are still under way are of pieces that were given up.
        _empty(buffer)
        buffer.holder, file.is_moving = file, True
        return file, buffer

    def _read(self, file: GroupFile, buffer: HostBuffer) -> None:
        failure: Exception | None = None
        try:
            assert file.written is not None
            for event in (buffer.read_until, buffer.written_until, file.left):
                buffer.streams.wait_on_host(event)
            buffer.read_until = None
            memory = buffer.memory[: file.written.num_bytes]
            file.arrived = self._disk.read(file.path, len(file.written.header), memory)
        except Exception as error:
            failure = _explained(error, f"{file.path} could not be read: {error}; continue from the last checkpoint")
        with self._changed:
            if failure is None:
                file.buffer = buffer
            else:
                buffer.holder = None
            file.is_moving, file.failure = False, failure
            self._changed.notify_all()

    def _next_to_write(self) -> tuple[GroupFile] | None:
        file = self._can_write()
        if file is None:
            return None
        file.is_moving = True
        return (file,)

    def _write(self, file: GroupFile) -> None:
        image, buffer, stored = file.unwritten, file.buffer, file.stored
        assert image is not None
        assert buffer is not None
        failure: Exception | None = None
        try:
            for event in stored:
                buffer.streams.wait_on_host(event)
            memory = buffer.memory[: image.num_bytes]
            file.left = buffer.written_until = self._disk.write(file.path, image, memory, file.written)
        except Exception as error:
            failure = _explained(
                error, f"{error}. Nothing is lost: the newer state stays in host memory; free space, and go on"
            )
        with self._changed:
            if failure is None:
                file.written, file.unwritten, file.must_be_written = image, None, False
            file.is_moving, file.failure = False, failure
            self._changed.notify_all()


def _empty(buffer: HostBuffer) -> None:
    """Take a buffer from its holder, if it has one."""
    holder, buffer.holder = buffer.holder, None
    if holder is not None:
        holder.buffer = None


def _again(failure: Exception) -> Exception:
    """A copy of an error: raising the error itself would tie what its frames hold, the optimizer, to the threads."""
    again = copy(failure)
    again.__cause__ = failure
    return again


def _explained(error: Exception, text: str) -> Exception:
    """An error of a thread, as the step raises it."""
    if not isinstance(error, OSError):
        return error
    explained = OSError(error.errno, text) if error.errno is not None else OSError(text)
    explained.__cause__ = error
    return explained
