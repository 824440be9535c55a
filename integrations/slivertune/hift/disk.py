"""The disk of a store of files: a folder with room that is taken ahead, and two threads, a reader and a writer.

All that is read and written goes through one object of this kind, so that a simulator that stands in for it
(`disks_made_by`) sees its order.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from slivertune.core.atomic import partial_version
from slivertune.core.copy_streams import Event
from slivertune.core.direct_files import read_file, write_file
from slivertune.core.maker import Maker
from slivertune.core.write_errors import explain_write_errors
from slivertune.hift.disk_reserve import DiskReserve
from slivertune.hift.group_image import GroupImage, Name, mapped_tensors

Choose = Callable[[], tuple[Any, ...] | None]
"""Says, with the lock held, what a thread does next; None for nothing."""
Move = Callable[..., None]
"""Does it."""


class _ClosedError(Exception):
    """Ends a transfer."""


class Disk:
    """A hidden folder that is removed with its process; of killed ones, by the next disk of the same target.

    Args:
        target: Whose hidden folder it is.
        needs_bytes: What all files, and one more of the largest, will take.

    Raises:
        OSError: If there is no room, or the folder can't be made; names it.
    """

    def __init__(self, target: Path, needs_bytes: int) -> None:
        self._target = target
        self.changed = threading.Condition()
        """The lock of all that the threads share, and what wakes them."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._process = os.getpid()
        with ExitStack() as opened, explain_write_errors(target, needs_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._folder = opened.enter_context(partial_version(target)).folder
            self._reserve = DiskReserve(self._folder, needs_bytes)
            opened.callback(self._reserve.close)
            self._opened = opened.pop_all()

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self._folder / name

    def start(self, reader: tuple[Choose, Move], writer: tuple[Choose, Move]) -> None:
        """Start the threads.

        Args:
            reader: What it does, one after the other.
            writer: Likewise.
        """
        self._threads = [
            threading.Thread(target=self._work, args=each, name=f"slivertune-{name}", daemon=True)
            for name, each in (("reader", reader), ("writer", writer))
        ]
        for thread in self._threads:
            thread.start()

    def read(self, path: Path, start: int, memory: torch.Tensor) -> Event:
        """Fill memory of the host from a file; by the reader.

        Args:
            path: The file.
            start: Where in it to begin; whole pages.
            memory: uint8, whole pages.

        Returns:
            When it is there; None where it is.

        Raises:
            OSError: If the file can't be read, or ends too early; names it.
        """
        read_file(path, start, _view(memory), self._watch)

    def write(self, path: Path, image: GroupImage, memory: torch.Tensor, older: GroupImage | None) -> Event:
        """Write a file anew under another name, and rename it; by the writer.

        Args:
            path: The file.
            image: What it holds.
            memory: Its data; uint8, whole pages.
            older: What the file that it replaces holds; None where there is none.

        Returns:
            When it is there; None where it is.

        Raises:
            OSError: If it can't be written.
        """
        partial = path.with_suffix(".partial")
        try:
            with explain_write_errors(self._target, image.file_bytes):
                self._reserve.lend(image.file_bytes)
                write_file(partial, [image.header, _view(memory)], self._watch)
                partial.rename(path)
        except Exception:
            self._reserve.take_back(image.file_bytes)
            raise
        if older is not None:
            self._reserve.take_back(older.file_bytes)

    def mapped(self, path: Path, models: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Tensors of a file, as `mapped_tensors` has them."""
        return mapped_tensors(path, models)

    def remove(self, path: Path, image: GroupImage) -> None:
        """Remove a file.

        Args:
            path: The file.
            image: What it holds.
        """
        path.unlink(missing_ok=True)
        self._reserve.take_back(image.file_bytes)

    def wait_on_host(self, event: Event) -> None:
        """Wait for a moment that `read` or `write` has returned; here all of them are over."""

    def has_happened(self, event: Event) -> bool:
        """Whether such a moment is over, as far as the host knows now."""
        return True

    def close(self) -> None:
        """End the threads, and remove all files."""
        if os.getpid() != self._process:
            return  # a fork's memory is not the run
        if threading.current_thread() in self._threads:
            # The optimizer was collected there, wherever that thread was.
            threading.Thread(target=self.close, daemon=True).start()
            return
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._opened.close()

    def _work(self, choose: Choose, move: Move) -> None:
        while True:
            with self.changed:
                while (chosen := choose()) is None and not self._is_closed:
                    self.changed.wait()
                if self._is_closed:
                    return
            assert chosen is not None
            move(*chosen)

    def _watch(self) -> None:
        if self._is_closed:
            raise _ClosedError


disk_of = Maker(Disk)
"""Makes the disk of a store."""

disks_made_by = disk_of.replaced_by
"""Lets something else stand in for the disks that are made meanwhile; takes what makes it, as `Disk` is made."""


def _view(memory: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, memory.numpy()))
