"""The file that stores one group's master weights and optimizer state between its turns (`state="disk"`)."""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from slivertune.core.ledger import FileBytes
from slivertune.core.write_errors import explain_write_errors

_PART_BYTES = 16 * 2**20
"""Bytes per read or write."""
_CANT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ENOSYS)
_MOUNTS = Path("/proc/self/mountinfo")


class GroupFile:
    """A file without a name, whose space is reserved on creation and freed when the process ends, even by a kill."""

    def __init__(self, folder: Path, group: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.used_bytes = 0
        """Bytes of state, from the beginning of the file."""
        self._title = f"the state of group {group} in {folder}"
        self._checksum: int | None = None
        # If files can't be made without a name, it has one for a moment, which `core.write_errors` knows.
        file = tempfile.TemporaryFile(dir=folder, prefix=".state.", suffix=".partial", buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        self._size = FileBytes()
        self._size.num_bytes = num_bytes

    def clear(self) -> None:
        """Forget the stored state."""
        self.used_bytes, self._checksum = 0, None

    def write(self, memory: torch.Tensor) -> None:
        """Write the state that some memory begins with to the disk and wait for it, unless the file has it."""
        state = _view(memory[: self.used_bytes])
        if self._checksum is not None and self._checksum == xxhash.xxh3_64_intdigest(state):
            return
        self._checksum = None
        try:
            checksum = self._transfer(os.pwritev, state)
            os.fdatasync(self._descriptor)  # else nobody hears of a write that fails later
        except OSError as error:
            text = f"{self._title} could not be written: {error.strerror}. Nothing is lost: the newer state is in host "
            raise OSError(error.errno, text + "memory. Free space there, and call step() again") from error
        self._checksum = checksum

    def read(self, memory: torch.Tensor) -> None:
        """Read the state, if there is one, to the beginning of some memory, and verify its checksum."""
        if self._checksum is None:
            return
        try:
            if self._transfer(os.preadv, _view(memory[: self.used_bytes])) != self._checksum:
                raise OSError(errno.EIO, "the disk has returned other bytes than were written")
        except OSError as error:
            text = f"{self._title} could not be read: {error.strerror}. Continue from the last checkpoint"
            raise OSError(error.errno, text) from error

    def map(self) -> mmap.mmap:
        """Map the file. Later writes to the file show in the mapping, and writes to the mapping stay in memory."""
        return mmap.mmap(self._descriptor, self.num_bytes, access=mmap.ACCESS_COPY)

    def _transfer(self, move: Callable[[int, list[Any], int], int], state: memoryview) -> int:
        """Read or write all of the state, and return its checksum."""
        done, checksum = 0, xxhash.xxh3_64()
        while done < len(state):
            count = move(self._descriptor, [state[done : done + _PART_BYTES]], done)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends after {done:,} of {len(state):,} bytes")
            checksum.update(state[done : done + count])
            done += count
        return checksum.intdigest()


def make_files(folder: Path, sizes: Mapping[int, int]) -> dict[int, GroupFile]:
    """Create the files of all groups, given their bytes by group.

    Raises:
        OSError: If the folder can't be written, has no space, can't reserve it or is in memory. The error names the
            folder and the bytes, and no files remain.
    """
    num_bytes, reason = sum(sizes.values()), "it lies in memory (tmpfs)"
    with explain_write_errors(folder / "state", num_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if not sizes or _file_system_of(folder) not in ("tmpfs", "ramfs"):
                return {group: GroupFile(folder, group, size) for group, size in sizes.items()}
        except OSError as error:
            if error.errno not in _CANT_RESERVE:
                raise
            reason = f"its file system can't reserve space ({error.strerror})"
        raise OSError(
            errno.EOPNOTSUPP,
            f'state_dir={str(folder)!r} can\'t store {num_bytes:,} bytes of state="disk": {reason}. Name a folder on a '
            'local disk, or use state="host"',
        )


def _file_system_of(folder: Path) -> str | None:
    """Return the type of a folder's file system, or None if Linux does not tell."""
    number = folder.stat().st_dev
    for line in _MOUNTS.read_text(encoding="utf-8").splitlines() if _MOUNTS.exists() else ():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == f"{os.major(number)}:{os.minor(number)}":
            return file_system.split()[0]
    return None


def _view(memory: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, memory.numpy()))
