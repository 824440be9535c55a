"""Where a run writes and what it continues: never over an earlier run, never from half a checkpoint.

Which of its checkpoints are whole, which is the newest of them, and which may go.
"""

import itertools
import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slivertune.core.atomic import is_partial
from slivertune.core.manifest import find_damage, read_entries, remove_manifest
from slivertune.core.output_place import check_place

RESULTS_NAME = "results.json"
"""The file that a run writes into its folder when it ends."""
START_NAME = "slivertune_run.json"
"""The file that it writes there when it starts, so that one which is killed early can start again in that folder."""
SETTINGS_NAME = "slivertune_run.yaml"
"""The file with its settings that it writes beside that one."""

_RUNS = Path("runs")
_ROUNDING = 1e-6
"""Of an update, by which a number of epochs times the updates of one may be off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The folder of a run, and the checkpoint it continues from."""

    path: Path
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    """What the user should know about checkpoints that were passed over."""
    is_finished: bool = False
    """Whether the run in it has come to its end, and nothing is left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """How long a run is to train."""

    max_steps: int = -1
    """Updates; 0 or less where epochs decide."""
    num_train_epochs: float = 3.0

    def exceeds(self, folder: Path, num_steps: int) -> bool:
        """Tell whether it asks for more updates than a finished run was asked for.

        Args:
            folder: The run's, whose log knows how many updates were planned and how many an epoch has.
            num_steps: Updates that it made; fewer than planned where it stopped early.
        """
        log = _read_log(folder)
        planned = max(num_steps, int(log.get("max_steps") or 0))
        if self.max_steps > 0:
            return self.max_steps > planned
        if not log.get("epoch"):
            return False
        updates_per_epoch = float(log["global_step"] / log["epoch"])
        return math.ceil(self.num_train_epochs * updates_per_epoch - _ROUNDING) > planned


def choose_run_folder(method: str, asked: str | None, resume: str | None, goal: Goal | None = None) -> RunFolder:
    """Choose where a run writes and what it continues from.

    Args:
        method: Names the default folder: `runs/METHOD`, or the first free one of `runs/METHOD-2`, `runs/METHOD-3`, ...
        asked: `--output_dir`.
        resume: `--resume_from_checkpoint`: "true" for the newest whole checkpoint; "auto" for the same, or the start
            where there is none; or the path of one.
        goal: How long the run is to train; a finished run goes on where it exceeds the run's own.

    Returns:
        The folder, which need not exist yet, and the checkpoint if the run is resumed.

    Raises:
        FileExistsError: If the folder asked for holds something already and the run is not resumed from there, or a
            file stands in its place.
        ValueError: If it can't be written, there is nothing to resume, that is not whole, or newer checkpoints would be
            written over.
    """
    folder = None if asked is None else Path(asked).expanduser()
    if folder is not None:
        check_place(folder)
    if resume is None or resume.lower() == "false":
        return RunFolder(path=_fresh_folder(method, folder))
    if resume.lower() == "true":
        return _continue_newest(method, folder)
    if resume.lower() == "auto":
        return _start_or_continue(method, folder, goal or Goal())
    return _continue_from(Path(resume).expanduser(), folder)


def _fresh_folder(method: str, asked: Path | None) -> Path:
    if asked is None:
        check_place(_RUNS / method)
        return next(folder for folder in _default_folders(method) if not _is_occupied(folder))
    if _is_occupied(asked):
        raise FileExistsError(
            f"output_dir {asked} already holds something, which is never written over; name another folder, or "
            "continue what lies there with --resume_from_checkpoint true, or auto"
        )
    return asked


def _continue_newest(method: str, asked: Path | None) -> RunFolder:
    ours = [path for path in itertools.takewhile(Path.exists, _default_folders(method)) if checkpoint_folders(path)]
    folder = asked or (ours[-1] if ours else _RUNS / method)
    checkpoint, passed_over = newest_whole(folder)
    if checkpoint is None:
        reasons = "; ".join(passed_over) or "it holds no checkpoint"
        raise ValueError(
            f"there is nothing whole to resume in {folder}: {reasons}; start again in another --output_dir"
        )
    return RunFolder(path=folder, checkpoint=checkpoint, notes=tuple(f"passed over: {line}" for line in passed_over))


def _start_or_continue(method: str, asked: Path | None, goal: Goal) -> RunFolder:
    """The newest whole checkpoint of a run, or its start; a run that has reached the goal is left alone."""
    # By default the folder that the first of these commands has made, be it empty; not another for each.
    ours = [
        path
        for path in itertools.takewhile(Path.exists, _default_folders(method))
        if not _is_occupied(path) or _is_of_a_run(path)
    ]
    folder = asked or (ours[-1] if ours else _fresh_folder(method, None))
    checkpoint, passed_over = newest_whole(folder)
    notes = tuple(f"passed over: {line}" for line in passed_over)
    results = read_results(folder)
    # Resumed with more steps, it has checkpoints beyond its first results.
    if results is not None and (checkpoint is None or checkpoint_step(checkpoint) <= results["num_steps"]):
        if not goal.exceeds(folder, results["num_steps"]):
            return RunFolder(path=folder, checkpoint=checkpoint, is_finished=True)
        if checkpoint is None:
            raise ValueError(
                f"the run in {folder} is finished after {results['num_steps']} updates and kept no checkpoint to train "
                "on from; start again in another --output_dir, with a --save_strategy other than no"
            )
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
        command = results.get("command")
        is_command = isinstance(command, list) and all(isinstance(word, str) for word in command)
        if type(results.get("num_steps")) is int and is_command:
            return results
    raise ValueError(
        f"{path} can't be read: a run of slivertune train has a number as its num_steps and a list of words as its "
        "command; move it away to go on"
    )


def _read_log(folder: Path) -> dict[str, Any]:
    """Read what the Trainer's log of a finished run says of its length; nothing where it can't be read."""
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
            f"resume_from_checkpoint={str(checkpoint)!r} is not a folder; give a checkpoint's path, true for the "
            "newest, or auto for the newest or the start"
        )
    damage = find_damage(checkpoint)
    if damage is not None:
        whole, _ = newest_whole(checkpoint.parent)
        instead = "no checkpoint beside it is whole" if whole is None else f"{whole} is the newest whole one"
        raise ValueError(f"{checkpoint} can't be resumed: {damage}; {instead}")
    folder = asked or checkpoint.parent
    if folder.resolve() != checkpoint.parent.resolve():
        return RunFolder(path=_fresh_folder("", folder), checkpoint=checkpoint)
    for path in checkpoint_folders(folder):
        if checkpoint_step(path) > checkpoint_step(checkpoint) and find_damage(path, read_files=False) is None:
            raise ValueError(
                f"{path} is newer than {checkpoint} and would be written over; name another --output_dir to branch off"
            )
    return RunFolder(path=folder, checkpoint=checkpoint)


def _default_folders(method: str) -> itertools.chain[Path]:
    return itertools.chain([_RUNS / method], (_RUNS / f"{method}-{number}" for number in itertools.count(2)))


def _is_occupied(folder: Path) -> bool:
    if not folder.is_dir():
        return folder.exists()
    # Nor is what a kill has left of a write.
    return any(path.name not in (START_NAME, SETTINGS_NAME) and not is_partial(path) for path in folder.iterdir())


def checkpoint_folders(output_folder: Path) -> list[Path]:
    """The Trainer's checkpoints in a run's folder, whole or not, oldest first."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = (path for path in output_folder.glob("*") if pattern.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """The update after which a checkpoint was taken, from its name."""
    return int(folder.name.rpartition("-")[2])


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts that stand in a checkpoint's manifest; it must be whole."""
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
    protected = {path.resolve() for path in (whole, best) if path is not None}
    candidates = [folder for folder in folders if folder.resolve() not in protected]
    old = candidates[: max(0, len(folders) - max(limit, len(protected)))]
    for folder in old:
        # Without its marker first: a deletion that is cut short must not leave what looks whole.
        remove_manifest(folder)
        shutil.rmtree(folder)
    return old
