"""Choice of a run's folder and checkpoint. No earlier run is overwritten, and only whole checkpoints are resumed.

The module finds a run's whole checkpoints and the newest of them, and deletes old ones.
"""

import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slivertune.core.atomic import is_partial
from slivertune.core.manifest import find_damage, is_of_other_format, read_entries, remove_manifest
from slivertune.core.output_place import check_place
from slivertune.core.user_path import user_path

RESULTS_NAME = "results.json"
"""Name of the file that a run writes into its folder when it ends."""
START_NAME = "slivertune_run.json"
"""Name of the file that a run writes when it starts, so that a run killed early can start again in the same folder."""
SETTINGS_NAME = "slivertune_run.yaml"
"""Name of the settings file that a run writes beside `START_NAME`."""

_RUNS = Path("runs")
_ROUNDING = 1e-6
"""Tolerance, in updates, for rounding errors in epochs * updates per epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """Folder of a run, and the checkpoint from which it resumes."""

    path: Path
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    """Notes for the user about checkpoints that were skipped."""
    is_finished: bool = False
    """Whether the run in the folder has finished and nothing is left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Length of a run."""

    max_steps: int = -1
    """Number of updates. 0 or less if epochs decide."""
    num_train_epochs: float = 3.0

    def exceeds(self, folder: Path, num_steps: int) -> bool:
        """Check whether this goal needs more updates than a finished run was asked for.

        Args:
            folder: Folder of the run, whose log has the number of planned updates and of updates per epoch.
            num_steps: Number of updates that the run made; fewer than planned if it stopped early.
        """
        return self.num_updates(folder) > max(num_steps, int(_read_log(folder).get("max_steps") or 0))

    def num_updates(self, folder: Path) -> int:
        """Return the number of updates of this goal, or 0 if it is in epochs and their length is unknown.

        Args:
            folder: Folder of a finished run on the same data.
        """
        log = _read_log(folder)
        if self.max_steps > 0 or not log.get("epoch"):
            return max(0, self.max_steps)
        updates_per_epoch = float(log["global_step"] / log["epoch"])
        return math.ceil(self.num_train_epochs * updates_per_epoch - _ROUNDING)


def choose_run_folder(method: str, asked: str | None, resume: str | None, goal: Goal | None = None) -> RunFolder:
    """Choose the folder of a run and the checkpoint from which it resumes.

    Args:
        method: Name for the default folder: `runs/METHOD`, or the first free of `runs/METHOD-2`, `runs/METHOD-3`, ...
        asked: Value of `--output_dir`.
        resume: Value of `--resume_from_checkpoint`: "true" for the newest whole checkpoint; "auto" for the same, or a
            fresh start if there is none; or the path of a checkpoint. A finished run is found with both.
        goal: Length of the run. A finished run continues if the goal exceeds its own length.

    Returns:
        The folder, which need not exist yet, and the checkpoint if the run is resumed.

    Raises:
        FileExistsError: If the folder is not empty and the run is not resumed from there, or if a file stands in its
            place.
        ValueError: If the folder can't be written, if there is no checkpoint to resume or it is not whole, or if newer
            checkpoints would be overwritten.
    """
    folder = None if asked is None else user_path(asked)
    if folder is not None:
        check_place(folder)
    if resume is None or resume.lower() == "false":
        return RunFolder(path=_fresh_folder(method, folder))
    if resume.lower() == "true":
        return _continue_newest(method, folder, goal or Goal())
    if resume.lower() == "auto":
        return _start_or_continue(method, folder, goal or Goal())
    return _continue_from(user_path(resume), folder)


def _fresh_folder(method: str, asked: Path | None) -> Path:
    if asked is None:
        check_place(_RUNS / method)
        return next(folder for folder in _default_folders(method) if not _is_occupied(folder))
    if _is_occupied(asked):
        raise FileExistsError(
            f"output_dir {asked} already holds something, which is never written over. Name another folder, or "
            "continue the run there with --resume_from_checkpoint true, or auto"
        )
    return asked


def _continue_newest(method: str, asked: Path | None, goal: Goal) -> RunFolder:
    """Choose the newest whole checkpoint of a run. A run with nothing left to train is left alone, with its results."""
    ours = [path for path in itertools.takewhile(Path.exists, _default_folders(method)) if checkpoint_folders(path)]
    folder = asked or (ours[-1] if ours else _RUNS / method)
    checkpoint, passed_over = newest_whole(folder)
    if checkpoint is None:
        _refuse_other_format(reversed(checkpoint_folders(folder)))
        reasons = "; ".join(passed_over) or "it holds no checkpoint"
        raise ValueError(
            f"there is nothing whole to resume in {folder}: {reasons}. Start again in another --output_dir"
        )
    results = read_results(folder)
    # Unlike with "auto", a run that stopped early goes on, and one whose last checkpoint is damaged repeats its end.
    is_trained = results is not None and checkpoint_step(checkpoint) == results["num_steps"]
    return RunFolder(
        path=folder,
        checkpoint=checkpoint,
        notes=tuple(f"passed over: {line}" for line in passed_over),
        is_finished=is_trained and goal.num_updates(folder) <= checkpoint_step(checkpoint),
    )


def _start_or_continue(method: str, asked: Path | None, goal: Goal) -> RunFolder:
    """Choose the newest whole checkpoint of a run, or a fresh start. A run that has reached the goal is left alone."""
    # By default, use the folder that the first such command made, even if it is empty, not a new one each time.
    ours = [
        path
        for path in itertools.takewhile(Path.exists, _default_folders(method))
        if not _is_occupied(path) or _is_of_a_run(path)
    ]
    folder = asked or (ours[-1] if ours else _fresh_folder(method, None))
    checkpoint, passed_over = newest_whole(folder)
    notes = tuple(f"passed over: {line}" for line in passed_over)
    results = read_results(folder)
    # A run resumed with more steps has checkpoints beyond its first results.
    if results is not None and (checkpoint is None or checkpoint_step(checkpoint) <= results["num_steps"]):
        if not goal.exceeds(folder, results["num_steps"]):
            return RunFolder(path=folder, checkpoint=checkpoint, is_finished=True)
        if checkpoint is None:
            raise ValueError(
                f"the run in {folder} is finished after {results['num_steps']} updates and kept no checkpoint to train "
                "on from. Start again in another --output_dir, with a --save_strategy other than no"
            )
    if checkpoint is not None:
        return RunFolder(path=folder, checkpoint=checkpoint, notes=notes)
    # A start would write over them in the end.
    _refuse_other_format(reversed(checkpoint_folders(folder)))
    if _is_occupied(folder) and not _is_of_a_run(folder):
        raise FileExistsError(
            f"output_dir {folder} holds no checkpoint, and files that no run of slivertune train wrote, which are "
            "never written over. Name another folder"
        )
    return RunFolder(path=folder, notes=(*notes, f"{folder} holds no whole checkpoint; this run begins at the start"))


def _is_of_a_run(folder: Path) -> bool:
    """Check whether a folder has the files of a run of this command."""
    return folder.is_dir() and ((folder / START_NAME).is_file() or bool(checkpoint_folders(folder)))


def read_results(folder: Path) -> dict[str, Any] | None:
    """Read the results of a finished run.

    Args:
        folder: Folder of the run.

    Returns:
        Contents of its `results.json`, with `num_steps` as a number of updates and `command` as a list of words. None
        if there is no such file.

    Raises:
        ValueError: If the file is damaged or has another format.
    """
    path = folder / RESULTS_NAME
    try:
        results: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read ({error}). Move it away to go on") from error
    if isinstance(results, dict):
        command = results.get("command")
        is_command = isinstance(command, list) and all(isinstance(word, str) for word in command)
        if type(results.get("num_steps")) is int and is_command:
            return results
    raise ValueError(
        f"{path} can't be read: a run of slivertune train has a number as its num_steps and a list of words as its "
        "command. Move it away to go on"
    )


def _read_log(folder: Path) -> dict[str, Any]:
    """Read the length of a finished run from the Trainer's log. Return an empty dict if the log can't be read."""
    try:
        state: Any = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    names = ("max_steps", "global_step", "epoch")
    is_known = isinstance(state, dict) and all(isinstance(state.get(name), int | float) for name in names)
    return {name: state[name] for name in names} if is_known else {}


def _continue_from(checkpoint: Path, asked: Path | None) -> RunFolder:
    if not checkpoint.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} is not a folder. Give a checkpoint's path, true for the "
            "newest, or auto for the newest or the start"
        )
    damage = find_damage(checkpoint)
    if damage is not None:
        _refuse_other_format([checkpoint])
        whole, _ = newest_whole(checkpoint.parent)
        instead = "Start again: no checkpoint beside it is whole" if whole is None else f"Resume from {whole}"
        raise ValueError(f"{checkpoint} can't be resumed: {damage}. {instead}")
    folder = asked or checkpoint.parent
    if folder.resolve() != checkpoint.parent.resolve():
        return RunFolder(path=_fresh_folder("", folder), checkpoint=checkpoint)
    for path in checkpoint_folders(folder):
        if checkpoint_step(path) > checkpoint_step(checkpoint) and find_damage(path, read_files=False) is None:
            raise ValueError(
                f"{path} is newer than {checkpoint} and would be written over. Name another --output_dir to branch off"
            )
    return RunFolder(path=folder, checkpoint=checkpoint)


def _refuse_other_format(checkpoints: Iterable[Path]) -> None:
    """Refuse to resume a checkpoint that another version of this library wrote."""
    for path in filter(is_of_other_format, checkpoints):
        damage = find_damage(path, read_files=False)
        raise ValueError(f"{path} can't be resumed: {damage}. Or start again in another --output_dir")


def _default_folders(method: str) -> itertools.chain[Path]:
    return itertools.chain([_RUNS / method], (_RUNS / f"{method}-{number}" for number in itertools.count(2)))


def _is_occupied(folder: Path) -> bool:
    if not folder.is_dir():
        return folder.exists()
    # The remains of a write that was killed don't count, either.
    return any(path.name not in (START_NAME, SETTINGS_NAME) and not is_partial(path) for path in folder.iterdir())


def checkpoint_folders(output_folder: Path) -> list[Path]:
    """List the Trainer's checkpoints in a run's folder, whole or not, oldest first."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = (path for path in output_folder.glob("*") if pattern.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """Return the update after which a checkpoint was taken, from its name."""
    return int(folder.name.rpartition("-")[2])


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts in a checkpoint's manifest. The checkpoint must be whole."""
    return dict(read_entries(folder).get("facts", {}))


def newest_whole(output_folder: Path, *, read_files: bool = True) -> tuple[Path | None, list[str]]:
    """Find the newest whole checkpoint of a run.

    Args:
        output_folder: Folder of the run.
        read_files: Whether to read the files, as for `find_damage`.

    Returns:
        The checkpoint or None, and a line about each newer one that was skipped.
    """
    passed_over: list[str] = []
    for folder in reversed(checkpoint_folders(output_folder)):
        damage = find_damage(folder, read_files=read_files)
        if damage is None:
            return folder, passed_over
        passed_over.append(f"{folder} is not whole: {damage}")
    return None, passed_over


def remove_old(output_folder: Path, limit: int, best: Path | None) -> list[Path]:
    """Delete the oldest checkpoints, but never the newest whole one or the best one.

    Args:
        output_folder: Folder of the run.
        limit: Number of checkpoints to keep, at least 1.
        best: Checkpoint with the best metric, if there is one.

    Returns:
        Folders of the deleted checkpoints.
    """
    folders = checkpoint_folders(output_folder)
    whole, _ = newest_whole(output_folder, read_files=False)
    if whole is None:
        return []
    protected = {path.resolve() for path in (whole, best) if path is not None}
    candidates = [folder for folder in folders if folder.resolve() not in protected]
    old = candidates[: max(0, len(folders) - max(limit, len(protected)))]
    for folder in old:
        # Remove the manifest first: an interrupted deletion must not leave a checkpoint that looks whole.
        remove_manifest(folder)
        shutil.rmtree(folder)
    return old
