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
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        aside = Path(file.name)
        try:
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            aside.unlink()
            raise
    # A temporary file is readable by its owner alone; what we publish follows the user's umask like any other file.
    aside.chmod(0o666 & ~_umask())
    aside.replace(path)


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


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only way to read the umask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
