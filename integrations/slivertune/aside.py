"""Files and folders that are written aside and renamed, so that nobody ever meets half of one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all.

    Args:
        path: The file; its folder must exist. An older file is replaced.
        value: What `json.dumps` takes.
    """
    with new_file(path) as aside:
        aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A file beside `target` that takes its place when the block ends well, and is removed when it does not.

    Args:
        target: The file; its folder must exist. An older file is whole until the new one replaces it.

    Yields:
        The file to write.
    """
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        _publish(aside)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(target.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block ends well, and is removed when it does not.

    Args:
        target: Where the folder is to appear; nothing may be there yet.

    Yields:
        The folder to write into.

    Raises:
        FileExistsError: If something is at `target`, before the block or after it.
    """
    check_absent(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield aside
        for path in [*aside.rglob("*"), aside]:
            _publish(path)
        # A rename takes the place of an empty folder without a word.
        check_absent(target)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(target.parent)


@contextmanager
def folder_aside(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place when the block ends well, and is removed when it does not.

    Args:
        target: Where the folder is to appear. An older folder there is replaced; it is whole until the new one is.

    Yields:
        The folder to write into.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    aside.chmod(0o777 & ~_umask())
    try:
        yield aside
        for file in aside.rglob("*"):
            if file.is_file():
                sync(file)
        if target.exists():
            retired = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.retired."))
            target.replace(retired)
            aside.replace(target)
            shutil.rmtree(retired)
        else:
            aside.replace(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(target.parent)


def check_absent(target: Path) -> None:
    """Refuse a path where something lies already.

    Raises:
        FileExistsError: Naming the path.
    """
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists already; name a folder that does not, or move it away")


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(path: Path) -> None:
    """Give a temporary file or folder the access rights of any other, and wait until it is on the disk.

    Temporary files, and what safetensors writes, are readable by their owner alone.
    """
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())
    sync(path)


def _umask() -> int:
    # The only way to read the umask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
