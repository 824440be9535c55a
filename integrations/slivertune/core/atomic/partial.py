"""The hidden folder beside a target in which its next version is written, and the cleaning up after killed processes.

`.NAME.XXXXXXXX.partial` holds a file `lock`, which its process keeps locked, the new version under the target's own
name, and for a moment the old one (`retired`). Locks end with their process however that ends, so that a folder whose
lock can be taken belongs to no living process. A folder can be exchanged with another in one step on Linux's own file
systems (renameat2); on others (NFS) the old version is moved away first, and a process that is killed right then leaves
no target: `recover`, which readers and the next writer call, puts the old version back.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_NAME = re.compile(r"\..+\.[a-z0-9_]{8}\.partial")
_LOCK, _RETIRED = "lock", "retired"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Partial:
    """A version of a target that is being written."""

    target: Path
    folder: Path
    """The hidden folder."""
    file_mode: int
    """Access rights of a new file here, by the umask and what the folder passes on."""

    @property
    def content(self) -> Path:
        """What is written; it takes the target's place."""
        return self.folder / self.target.name

    def publish(self) -> None:
        """Give all that was written the access rights of new files, and wait until it is on the disk.

        safetensors, for one, writes files that their owner alone can read.
        """
        for path in [*self.content.rglob("*"), self.content] if self.content.is_dir() else [self.content]:
            if path.is_symlink():
                continue
            if path.is_file():
                path.chmod(self.file_mode)
            sync(path)

    def replace_target(self) -> None:
        """Put the content, a folder, where an older folder may be, and wait until that is on the disk."""
        if not self.target.exists():
            self.content.rename(self.target)
        elif not exchange(self.content, self.target):
            # Where the second of the two fails, the end of the block puts the old version back.
            self.target.rename(self.folder / _RETIRED)
            self.content.rename(self.target)
        sync(self.target.parent)


@contextmanager
def partial_version(target: Path) -> Iterator[Partial]:
    """A hidden folder for the next version of a target; it is gone when the block ends, and so is any dead one.

    Args:
        target: The file or folder; its folder must exist.

    Yields:
        Where to write.
    """
    recover(target)
    _remove_dead(target)
    lock, folder = _make(target)
    with lock:
        try:
            yield Partial(target, folder, stat.S_IMODE(os.fstat(lock.fileno()).st_mode))
        finally:
            _remove(folder, target)


def recover(target: Path) -> None:
    """Put the old version of a folder back, where a process was killed between moving it away and the new one in.

    Does nothing where the target is there, and leaves a living process alone. Costs one listing of the folder that
    holds the target, if it is not there.

    Args:
        target: The folder.
    """
    if os.path.lexists(target):
        return
    for folder in _partials(target):
        with _locked_if_dead(folder) as is_dead:
            if is_dead and (folder / _RETIRED).exists():
                _put_back(folder / _RETIRED, target)


def is_partial(path: Path) -> bool:
    """Whether a path has the name of a hidden folder, which belongs to its writer alone and comes and goes."""
    return _NAME.fullmatch(path.name) is not None


def exchange(first: Path, second: Path) -> bool:
    """Let two paths change places in one step.

    Args:
        first: A path.
        second: Another on the same file system; both exist.

    Returns:
        Whether this file system can; if not, nothing has changed.

    Raises:
        OSError: If it can and failed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(target: Path) -> tuple[IO[bytes], Path]:
    """A new hidden folder and its lock, held; another process that removes dead ones may be at work."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
        try:
            lock = (folder / _LOCK).open("xb")
            try:
                _lock(lock)
                if _is_at(lock, folder / _LOCK):
                    return lock, folder
            except BaseException:
                lock.close()
                raise
            lock.close()
        except (FileNotFoundError, BlockingIOError):
            # Taken for dead before it was locked: make another.
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _lock(file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # A file system without locks: no other process can take this one either, so none removes the folder.
        pass


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _partials(target: Path) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.partial")
    try:
        with os.scandir(target.parent) as entries:
            return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name) and not entry.is_symlink()]
    except OSError:
        return []


def _remove_dead(target: Path) -> None:
    for folder in _partials(target):
        try:
            # One that its process has not even locked; fails where anything is in it.
            folder.rmdir()
        except OSError:
            with _locked_if_dead(folder) as is_dead:
                # The lock is made first and removed with the rest, so that without it a removal was cut short.
                if is_dead or not (folder / _LOCK).exists():
                    _remove(folder, target)


@contextmanager
def _locked_if_dead(folder: Path) -> Iterator[bool]:
    """Hold the lock of a hidden folder, if no living process does."""
    try:
        lock = (folder / _LOCK).open("r+b")
    except OSError:
        yield False
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield _is_at(lock, folder / _LOCK)


def _remove(folder: Path, target: Path) -> None:
    retired = folder / _RETIRED
    if retired.exists():
        _put_back(retired, target)
        if not os.path.lexists(target):
            return
        # Under another name first: half a version must never be put back.
        with suppress(FileNotFoundError):
            retired.rename(folder / "removed")
    shutil.rmtree(folder, ignore_errors=True)


def _put_back(retired: Path, target: Path) -> None:
    if not os.path.lexists(target):
        # Another process may have been faster.
        with suppress(OSError):
            retired.rename(target)
