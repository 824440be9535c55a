"""New files and folders that appear whole or not at all."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slivertune.core.atomic.errors import explain_write_errors
from slivertune.core.atomic.partial import partial_version, sync


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all.

    Args:
        path: The file; its folder must exist. An older file is replaced.
        value: What `json.dumps` takes.

    Raises:
        OSError: If it can't be written; names the file, and what it needed.
    """
    text = json.dumps(value, indent=2) + "\n"
    with atomic_file(path, needs_bytes=len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(target: Path, *, needs_bytes: int | None = None) -> Iterator[Path]:
    """A temporary file that replaces `target` when the block succeeds, and is removed when it fails.

    Args:
        target: The file; its folder must exist. An older file is whole until the new one replaces it.
        needs_bytes: Its size, where that is known; for the error of a full disk.

    Yields:
        The file to write; it does not exist yet.

    Raises:
        OSError: If it can't be written; names the file, and what it needed.
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
    """A temporary folder that is renamed to `target` when the block succeeds, and is removed when it fails.

    Args:
        target: Where the folder is to appear; nothing may be there yet.
        needs_bytes: The size of its files, where that is known; for the error of a full disk.

    Yields:
        The folder to write into.

    Raises:
        FileExistsError: If something is at `target`, before the block or after it.
        OSError: If it can't be written; names the folder, and what it needed.
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
    """A temporary folder that replaces `target` when the block succeeds, and is removed when it fails.

    At every moment the old folder or the new one is whole under the target's name, however the process ends; on file
    systems that can't exchange two folders in one step, readers call `recover` first (see `partial`).

    Args:
        target: Where the folder is to appear. An older folder there is replaced; where a link leads to it, there.
        needs_bytes: The size of its files, where that is known; for the error of a full disk.

    Yields:
        The folder to write into.

    Raises:
        OSError: If it can't be written; names the folder, and what it needed.
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
    """Refuse a path where something lies already.

    Raises:
        FileExistsError: Naming the path.
    """
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists already; name a folder that does not, or move it away")
