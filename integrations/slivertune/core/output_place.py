"""Check, before any computation, that a command can make its output folder."""

import os
import tempfile
from pathlib import Path

from slivertune.core.write_errors import cannot_write

_LONGEST_SHOWN = 80


def check_place(folder: Path, name: str = "output_dir") -> None:
    """Refuse a place where no folder can be made or written. Nothing is left there.

    Args:
        folder: The folder. It need not exist.
        name: Option that names it.

    Raises:
        FileExistsError: If a file or a link that leads nowhere is in the way.
        ValueError: If the folder can't be made or written.
    """
    if "\0" in str(folder):
        # `os.path.lexists` reports such a name as missing.
        raise ValueError(_no_folder(folder, name, "embedded null byte"))
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        kind = "a link that leads nowhere" if there.is_symlink() and not there.exists() else "a file"
        where = f"is {kind}" if there == folder else f"lies under {there}, which is {kind}"
        raise FileExistsError(f"{name} {folder} {where}. Name a folder, which need not exist yet")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{name} {cannot_write(folder, f'{there} is not writable for this user', there)}")
    try:
        # Access rights are not enough: /proc, a full quota.
        temporary = tempfile.TemporaryDirectory(dir=there)
    except OSError as error:
        raise ValueError(f"{name} {cannot_write(folder, str(error.strerror), there)}") from error
    with temporary:
        try:
            _make_below(Path(temporary.name), folder.absolute().relative_to(there.absolute()))
        except OSError as error:
            raise ValueError(_no_folder(folder, name, str(error.strerror))) from error


def check_file_place(file: Path, name: str) -> None:
    """Refuse a file that can't be written, because of its folder, its name, or a folder in its place.

    Args:
        file: The file. An older one may be there.
        name: Option that names it.

    Raises:
        FileExistsError: If a file is in the place of a folder of its path.
        ValueError: If the path is a folder, or can't be made.
    """
    check_place(file.parent, name)
    try:
        is_folder = file.is_dir()
    except OSError as error:
        shown = str(file)[:_LONGEST_SHOWN]
        raise ValueError(f"{name} {shown!r} can't be a file: {error.strerror}. Name another") from error
    if is_folder:
        raise ValueError(f"{name} {file} is a folder. Name a file in it")


def _make_below(folder: Path, missing: Path) -> None:
    """Make the missing folders inside another folder, whose rules for names are the same."""
    if ".." not in missing.parts:
        (folder / missing).mkdir(parents=True, exist_ok=True)


def _no_folder(folder: Path, name: str, reason: str) -> str:
    return f"{name} {str(folder)[:_LONGEST_SHOWN]!r} can't be a folder: {reason}. Name another"
