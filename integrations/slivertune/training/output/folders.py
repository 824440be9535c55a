"""Where a run writes and what it continues: never over an earlier run, never from half a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slivertune.core.atomic import is_partial
from slivertune.core.manifest import find_damage
from slivertune.training.output.checkpoints import checkpoint_folders, checkpoint_step, newest_whole

RESULTS_NAME = "results.json"
"""The file that a run writes into its folder when it ends."""
START_NAME = "slivertune_run.json"
"""The file that it writes there when it starts, so that one which is killed early can start again in that folder."""

_RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The folder of a run, and the checkpoint it continues from."""

    path: Path
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    """What the user should know about checkpoints that were passed over."""
    is_finished: bool = False
    """Whether the run in it has come to its end, and nothing is left to do."""


def choose_run_folder(method: str, asked: str | None, resume: str | None) -> RunFolder:
    """Choose where a run writes and what it continues from.

    Args:
        method: Names the default folder: `runs/METHOD`, or the first free one of `runs/METHOD-2`, `runs/METHOD-3`, ...
        asked: `--output_dir`.
        resume: `--resume_from_checkpoint`: "true" for the newest whole checkpoint; "auto" for the same, or the start
            where there is none; or the path of one.

    Returns:
        The folder, which need not exist yet, and the checkpoint if the run is resumed.

    Raises:
        FileExistsError: If the folder asked for holds something already and the run is not resumed from there, or a
            file stands in its place.
        ValueError: If it can't be written, there is nothing to resume, that is not whole, or newer checkpoints would be
            written over.
    """
    if resume is None or resume.lower() == "false":
        return RunFolder(path=_fresh_folder(method, asked))
    if resume.lower() == "true":
        return _continue_newest(method, asked)
    if resume.lower() == "auto":
        return _start_or_continue(method, asked)
    return _continue_from(Path(resume).expanduser(), asked)


def _fresh_folder(method: str, asked: str | None) -> Path:
    folder = Path(asked or _RUNS / method).expanduser()
    _check_place(folder)
    if asked is None:
        return next(folder for folder in _default_folders(method) if not _is_occupied(folder))
    if _is_occupied(folder):
        raise FileExistsError(
            f"output_dir {folder} already holds something, which is never written over; name another folder, or "
            "continue what lies there with --resume_from_checkpoint true, or auto"
        )
    return folder


def _continue_newest(method: str, asked: str | None) -> RunFolder:
    if asked is not None:
        folder = Path(asked).expanduser()
        _check_place(folder)
    else:
        existing = itertools.takewhile(Path.exists, _default_folders(method))
        folder = next((path for path in reversed(list(existing)) if checkpoint_folders(path)), _RUNS / method)
    checkpoint, passed_over = newest_whole(folder)
    if checkpoint is None:
        reasons = "; ".join(passed_over) or "it holds no checkpoint"
        raise ValueError(
            f"there is nothing whole to resume in {folder}: {reasons}; start again in another --output_dir"
        )
    return RunFolder(path=folder, checkpoint=checkpoint, notes=tuple(f"passed over: {line}" for line in passed_over))


def _start_or_continue(method: str, asked: str | None) -> RunFolder:
    """The newest whole checkpoint of a run, or its start; a run that has ended is left alone."""
    if asked is not None:
        folder = Path(asked).expanduser()
        _check_place(folder)
    else:
        # The one that the first of these commands has made, be it empty; not another for each.
        existing = itertools.takewhile(Path.exists, _default_folders(method))
        ours = [path for path in existing if not _is_occupied(path) or _is_of_a_run(path)]
        folder = ours[-1] if ours else _fresh_folder(method, None)
    checkpoint, passed_over = newest_whole(folder)
    notes = tuple(f"passed over: {line}" for line in passed_over)
    if _has_finished(folder, checkpoint):
        return RunFolder(path=folder, checkpoint=checkpoint, is_finished=True)
    if checkpoint is not None:
        return RunFolder(path=folder, checkpoint=checkpoint, notes=notes)
    if _is_occupied(folder) and not _is_of_a_run(folder):
        raise FileExistsError(
            f"output_dir {folder} holds no checkpoint, and files that no run of slivertune train wrote, which are "
            "never written over; name another folder"
        )
    return RunFolder(path=folder, notes=(*notes, f"{folder} holds no whole checkpoint; this run begins at the start"))


def _is_of_a_run(folder: Path) -> bool:
    """Whether a folder holds what a run of this command has made of it."""
    return folder.is_dir() and ((folder / START_NAME).is_file() or bool(checkpoint_folders(folder)))


def _has_finished(folder: Path, checkpoint: Path | None) -> bool:
    """Whether the run in a folder has written its results, and no later checkpoint."""
    results = read_results(folder)
    # Resumed with more steps, it has checkpoints beyond its first results.
    return results is not None and (checkpoint is None or checkpoint_step(checkpoint) <= results["num_steps"])


def read_results(folder: Path) -> dict[str, Any] | None:
    """Read the results of a finished run.

    Args:
        folder: The run's.

    Returns:
        What stands in its `results.json`, of which `num_steps` is a number of updates and `command` a list of words;
        None where there are none.

    Raises:
        ValueError: If the file is damaged or of another making.
    """
    path = folder / RESULTS_NAME
    try:
        results: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read ({error}); move it away to go on") from error
    if isinstance(results, dict):
        num_steps, command = results.get("num_steps"), results.get("command")
        is_command = isinstance(command, list) and all(isinstance(word, str) for word in command)
        if type(num_steps) is int and is_command:
            return results
    raise ValueError(
        f"{path} can't be read: a run of slivertune train has a number as its num_steps and a list of words as its "
        "command; move it away to go on"
    )


def _continue_from(checkpoint: Path, asked: str | None) -> RunFolder:
    if not checkpoint.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} is not a folder; give a checkpoint's path, true for the "
            "newest, or auto for the newest or the start"
        )
    damage = find_damage(checkpoint)
    if damage is not None:
        whole, _ = newest_whole(checkpoint.parent)
        instead = "no checkpoint beside it is whole" if whole is None else f"{whole} is the newest whole one"
        raise ValueError(f"{checkpoint} can't be resumed: {damage}; {instead}")
    folder = checkpoint.parent if asked is None else Path(asked).expanduser()
    if folder.resolve() != checkpoint.parent.resolve():
        return RunFolder(path=_fresh_folder("", str(folder)), checkpoint=checkpoint)
    newer = [path for path in checkpoint_folders(folder) if checkpoint_step(path) > checkpoint_step(checkpoint)]
    for path in newer:
        if find_damage(path, read_files=False) is None:
            raise ValueError(
                f"{path} is newer than {checkpoint} and would be written over; name another --output_dir to branch off"
            )
    return RunFolder(path=folder, checkpoint=checkpoint)


def _default_folders(method: str) -> itertools.chain[Path]:
    return itertools.chain([_RUNS / method], (_RUNS / f"{method}-{number}" for number in itertools.count(2)))


def _check_place(folder: Path) -> None:
    """Refuse a place where no folder can be, or none that can be written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        where = "is a file" if there == folder else f"lies under {there}, which is a file"
        raise FileExistsError(f"output_dir {folder} {where}; name a folder, which need not exist yet")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"output_dir {folder} can't be written: {there} is not writable for this user; name another folder"
        )


def _is_occupied(folder: Path) -> bool:
    if not folder.is_dir():
        return folder.exists()
    # Nor is what a kill has left of a write.
    return any(path.name != START_NAME and not is_partial(path) for path in folder.iterdir())
