"""Room on a disk that is taken before it is needed, so that a lack of it shows before anything is trained."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO


class DiskReserve:
    """Holds room in a folder for files to come, in a file without a name, which ends with its process; for any thread.

    Args:
        folder: On the disk.
        num_bytes: How much.

    Raises:
        OSError: If there is less, by the free space or a quota.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._num_bytes = 0
        self._lock = Lock()
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 -- it lives as long as this
        try:
            self._grow_to(num_bytes)
        except BaseException:
            self.close()
            raise

    def lend(self, num_bytes: int) -> None:
        """Free room for a file that is about to be written."""
        with self._lock:
            self._num_bytes = max(0, self._num_bytes - num_bytes)
            self._file.truncate(self._num_bytes)

    def take_back(self, num_bytes: int) -> None:
        """Hold what an older file has left again; what a checkpoint or somebody else holds by now stays theirs."""
        with self._lock, suppress(OSError):
            self._grow_to(self._num_bytes + num_bytes)

    def close(self) -> None:
        """Give up all room."""
        self._file.close()

    def _grow_to(self, num_bytes: int) -> None:
        try:
            if num_bytes:
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            self._num_bytes = num_bytes
        except OSError:
            self._file.truncate(self._num_bytes)
            raise
