"""Write files and folders atomically: under a temporary name, then renamed, so that no reader sees half of one.

A write may be interrupted at any moment (an error, Ctrl-C, SIGKILL). Either the old version or the new one is then
whole under the target's name. The next write of the same target removes the remains of a killed process.

The next version is written into a hidden folder beside the target, `.NAME.XXXXXXXX.partial`. It holds a file `lock`,
which its process keeps locked, the new version under the target's own name, and for a moment the old one (`retired`). A
lock ends with its process, however that ends. A folder whose lock can be taken therefore belongs to no live process. On
Linux's own file systems, two folders are exchanged in one step (renameat2). On others (NFS), the old version is moved
away first, and a process that is killed right then leaves no target. Readers and the next writer call `recover`, which
puts the old version back.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slivertune.core.file_locks import try_lock
from slivertune.core.write_errors import explain_write_errors, is_partial

__all__ = [
    "atomic_file",
    "atomic_folder",
    "atomic_new_folder",
    "check_absent",
    "explain_write_errors",
    "is_partial",
    "recover",
    "sync",
    "write_json",
]

_LOCK, _RETIRED = "lock", "retired"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all.

    Args:
        path: The file. Its folder must exist. An older file is replaced.
        value: Any value that `json.dumps` accepts.

    Raises:
        OSError: If the file can't be written. The message names the file and the bytes needed.
    """
    text = json.dumps(value, indent=2) + "\n"
    with atomic_file(path, needs_bytes=len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(target: Path, *, needs_bytes: int | None = None) -> Iterator[Path]:
    """Yield a temporary file that replaces `target` if the block succeeds and is removed if it fails.

    Args:
        target: The file. Its folder must exist. An older file stays whole until the new one replaces it.
        needs_bytes: Size of the file in bytes, if known, for the error of a full disk.

    Yields:
        The file to write. It does not exist yet.

    Raises:
        OSError: If the file can't be written. The message names the file and the bytes needed.
    """
    with explain_write_errors(target, needs_bytes):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        with partial_version(target) as partial:
            yield partial.content
            partial.publish()
            partial.content.replace(target)
            sync(target.parent)


@contextmanager
def atomic_new_folder(target: Path, *, needs_bytes: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` if the block succeeds and is removed if it fails.

    Args:
        target: Path of the new folder. Nothing may be there yet.
        needs_bytes: Size of its files in bytes, if known, for the error of a full disk.

    Yields:
        The folder to write into.

    Raises:
        FileExistsError: If something is at `target`, before the block or after it.
        OSError: If the folder can't be written. The message names the folder and the bytes needed.
    """
    with explain_write_errors(target, needs_bytes):
        check_absent(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_version(target) as partial:
            partial.content.mkdir()
            yield partial.content
            partial.publish()
            # A rename silently replaces an empty folder.
            check_absent(target)
            partial.content.rename(target)
            sync(target.parent)


@contextmanager
def atomic_folder(target: Path, *, needs_bytes: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` if the block succeeds and is removed if it fails.

    At every moment the old folder or the new one is whole under the target's name, however the process ends. On file
    systems that can't exchange two folders in one step, readers call `recover` first (see above).

    Args:
        target: Path of the folder. An older folder there is replaced. A link is followed.
        needs_bytes: Size of its files in bytes, if known, for the error of a full disk.

    Yields:
        The folder to write into.

    Raises:
        OSError: If the folder can't be written. The message names the folder and the bytes needed.
    """
    with explain_write_errors(target, needs_bytes):
        place = target.resolve() if target.is_symlink() else target
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        place.parent.mkdir(parents=True, exist_ok=True)
        with partial_version(place) as partial:
            partial.content.mkdir()
            yield partial.content
            partial.publish()
            partial.replace_target()


def check_absent(target: Path) -> None:
    """Refuse a path that exists already.

    Raises:
        FileExistsError: If the path exists, or is a link that leads nowhere.
    """
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists already. Name a new folder, or move it away")


@dataclass(frozen=True, slots=True)
class Partial:
    """A version of a target that is being written."""

    target: Path
    folder: Path
    """Hidden folder of this version."""
    file_mode: int
    """Access rights of a new file here, from the umask and the parent folder."""

    @property
    def content(self) -> Path:
        """Path of the new version, which replaces the target."""
        return self.folder / self.target.name

    def publish(self) -> None:
        """Give all new files the access rights of new files, and wait until everything is on the disk.

        safetensors, for one, writes files that only their owner can read.
        """
        for path in [*self.content.rglob("*"), self.content] if self.content.is_dir() else [self.content]:
            if path.is_symlink():
                continue
            if path.is_file():
                path.chmod(self.file_mode)
            sync(path)

    def replace_target(self) -> None:
        """Put the content, a folder, in place of an older folder, and wait until that is on the disk."""
        if not self.target.exists():
            self.content.rename(self.target)
        elif not exchange(self.content, self.target):
            # If the second rename fails, the end of the block puts the old version back.
            self.target.rename(self.folder / _RETIRED)
            self.content.rename(self.target)
        sync(self.target.parent)


@contextmanager
def partial_version(target: Path) -> Iterator[Partial]:
    """Remove dead hidden folders of a target, and yield a new one that lasts until the block ends.

    Args:
        target: The file or folder. Its parent folder must exist.

    Yields:
        The version to write.
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
    """Put the old version of a folder back, if a process was killed while it replaced that version.

    Does nothing if the target exists, or if the process is alive. Costs one listing of the folder that holds the
    target, if the target does not exist.

    Args:
        target: The folder.
    """
    if os.path.lexists(target):
        return
    for folder in _partials(target):
        with _locked_if_dead(folder) as is_dead:
            if is_dead and (folder / _RETIRED).exists():
                _put_back(folder / _RETIRED, target)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step.

    Args:
        first: A path.
        second: Another path on the same file system. Both exist.

    Returns:
        Whether this file system can exchange paths. If not, nothing has changed.

    Raises:
        OSError: If it can and the exchange failed.
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
    """Make a new hidden folder and hold its lock, even while another process removes dead folders."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
        try:
            with ExitStack() as stack:
                lock = stack.enter_context((folder / _LOCK).open("xb"))
                # Without file locks, no other process can take this one either, so none removes the folder.
                if try_lock(lock) is not False and _is_at(lock, folder / _LOCK):
                    stack.pop_all()
                    return lock, folder
                # Another process took it for dead before it was locked, so make another.
        except FileNotFoundError:
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _is_at(file: IO[bytes], path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
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
            # Removes a folder that its process has not locked yet. Fails if anything is in it.
            folder.rmdir()
        except OSError:
            with _locked_if_dead(folder) as is_dead:
                # The lock is made first and removed with the rest. If it is missing, a removal was interrupted.
                if is_dead or not (folder / _LOCK).exists():
                    _remove(folder, target)


@contextmanager
def _locked_if_dead(folder: Path) -> Iterator[bool]:
    """Hold the lock of a hidden folder, if no live process holds it."""
    try:
        lock = (folder / _LOCK).open("r+b")
    except OSError:
        yield False
        return
    with lock:
        yield bool(try_lock(lock)) and _is_at(lock, folder / _LOCK)


def _remove(folder: Path, target: Path) -> None:
    retired = folder / _RETIRED
    if retired.exists():
        _put_back(retired, target)
        if not os.path.lexists(target):
            return
        # Rename it first, since half a version must never be put back.
        with suppress(FileNotFoundError):
            retired.rename(folder / "removed")
    shutil.rmtree(folder, ignore_errors=True)


def _put_back(retired: Path, target: Path) -> None:
    if not os.path.lexists(target):
        # Another process may have been faster.
        with suppress(OSError):
            retired.rename(target)
