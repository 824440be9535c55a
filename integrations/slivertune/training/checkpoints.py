"""Which Trainer checkpoints are whole: those in which our marker, written last, agrees with every file.

A Trainer writes a checkpoint file by file into its final folder, so a folder's name says nothing about its being whole.
The marker lists the other files with their sizes and, up to 1 GiB, their CRC-32; it is written aside and renamed after
all of them have reached the disk.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slivertune import aside

MARKER_NAME = "slivertune_checkpoint.json"
_FORMAT = 1
# Reading a larger file back would take as long as writing it did; its size still has to agree.
_LARGEST_SUMMED = 2**30
_READ_BYTES = 2**20


def checkpoint_folders(output_folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a run's folder, whole or not, oldest first."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = [path for path in output_folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if pattern.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """The update after which a checkpoint was taken, from its name."""
    return int(folder.name.rpartition("-")[2])


def write_marker(folder: Path, facts: dict[str, Any]) -> None:
    """Mark a checkpoint as whole. Costs one read of its files up to 1 GiB each.

    Args:
        folder: The checkpoint; nothing may be writing to it any more.
        facts: What a resumed run should know; plain JSON.
    """
    marker = folder / MARKER_NAME
    marker.unlink(missing_ok=True)
    files = {}
    for path in _files(folder):
        aside.sync(path)
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    aside.sync(folder)
    aside.write_json(
        marker, {"format": _FORMAT, "global_step": checkpoint_step(folder), "facts": facts, "files": files}
    )
    aside.sync(folder)


def read_facts(folder: Path) -> dict[str, Any]:
    """What `write_marker` was given; the checkpoint must have its marker."""
    facts: dict[str, Any] = json.loads((folder / MARKER_NAME).read_text(encoding="utf-8"))["facts"]
    return facts


def find_damage(folder: Path, *, read_files: bool = True) -> str | None:
    """Say what keeps a checkpoint from being whole.

    Args:
        folder: The checkpoint.
        read_files: Whether to compare contents too, and not only sizes.

    Returns:
        The reason, or None where the checkpoint is whole.
    """
    marker = folder / MARKER_NAME
    if not marker.is_file():
        return f"it has no {MARKER_NAME}, so its writing was cut short"
    try:
        files: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER_NAME} can't be read"
    for name, stamp in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        num_bytes = path.stat().st_size
        if num_bytes != stamp["bytes"]:
            return f"{name} has {num_bytes:,} bytes where {stamp['bytes']:,} were written"
        if read_files and stamp["crc32"] is not None and _crc32(path) != stamp["crc32"]:
            return f"{name} holds other bytes than were written"
    return None


def newest_whole(output_folder: Path, *, read_files: bool = True) -> tuple[Path | None, list[str]]:
    """Find the newest whole checkpoint of a run.

    Args:
        output_folder: The run's folder.
        read_files: As for `find_damage`.

    Returns:
        The checkpoint, or None, and a line about each newer one that was passed over.
    """
    passed_over: list[str] = []
    for folder in reversed(checkpoint_folders(output_folder)):
        damage = find_damage(folder, read_files=read_files)
        if damage is None:
            return folder, passed_over
        passed_over.append(f"{folder} is not whole: {damage}")
    return None, passed_over


def remove_old(output_folder: Path, limit: int, best: Path | None) -> list[Path]:
    """Delete the oldest checkpoints; the newest whole one and the best one stay, whatever the limit.

    Args:
        output_folder: The run's folder.
        limit: Checkpoints to keep, at least 1.
        best: The checkpoint with the best metric, if there is one.

    Returns:
        What was deleted.
    """
    folders = checkpoint_folders(output_folder)
    whole, _ = newest_whole(output_folder, read_files=False)
    if whole is None:
        return []
    protected = {whole.resolve()} if best is None else {whole.resolve(), best.resolve()}
    candidates = [folder for folder in folders if folder.resolve() not in protected]
    old = candidates[: max(0, len(folders) - max(limit, len(protected)))]
    for folder in old:
        # Without its marker first: a deletion that is cut short must not leave what looks whole.
        (folder / MARKER_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return old


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARKER_NAME)


def _crc32(path: Path) -> int | None:
    if path.stat().st_size > _LARGEST_SUMMED:
        return None
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value
