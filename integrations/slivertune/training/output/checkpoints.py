"""Which Trainer checkpoints of a run are whole, which is the newest of them, and which may go."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slivertune.core.manifest import find_damage, read_entries, remove_manifest, write_manifest


def checkpoint_folders(output_folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a run's folder, whole or not, oldest first."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = [path for path in output_folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if pattern.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """The update after which a checkpoint was taken, from its name."""
    return int(folder.name.rpartition("-")[2])


def write_marker(folder: Path, facts: dict[str, Any]) -> None:
    """Mark a checkpoint as whole, by its manifest. Costs one read of its files.

    Args:
        folder: The checkpoint; nothing may be writing to it any more.
        facts: What a resumed run should know; plain JSON.
    """
    write_manifest(folder, marker_entries(folder, facts))


def marker_entries(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What the manifest of a checkpoint says beside its files.

    Args:
        folder: The checkpoint.
        facts: What a resumed run should know.
    """
    return {"global_step": checkpoint_step(folder), "facts": facts}


def read_facts(folder: Path) -> dict[str, Any]:
    """What `write_marker` was given; the checkpoint must be whole."""
    return dict(read_entries(folder).get("facts", {}))


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
        remove_manifest(folder)
        shutil.rmtree(folder)
    return old
