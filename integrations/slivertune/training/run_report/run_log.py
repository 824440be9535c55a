"""Log of a run, read from its folder: the Trainer's log, and the figures at its end."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from slivertune.core import atomic
from slivertune.training.folders import checkpoint_folders, checkpoint_step, read_results

Points = tuple[list[float], list[float]]
"""Steps and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """Log of one run from its beginning to its current state, including interruptions and resumes."""

    folder: Path
    """Folder of the run."""
    source: Path
    """File from which the log was read."""
    entries: list[dict[str, Any]]
    """Trainer's `log_history`, whose entries each have a `step`."""
    results: dict[str, Any]
    """Contents of `results.json`. Empty if the run has not ended, or was resumed since."""

    def series(self, name: str) -> Points:
        """Return all values that were logged under a name.

        Args:
            name: Name in the log.

        Returns:
            Steps and values, without values that are not finite.
        """
        points = [
            (float(entry["step"]), float(entry[name]))
            for entry in self.entries
            if _is_number(entry.get(name)) and math.isfinite(entry[name])
        ]
        return [step for step, _ in points], [value for _, value in points]

    def evaluations(self, name: str) -> Points:
        """Return an evaluation's metric before, during and at the end of training.

        Args:
            name: Name of the metric, such as `eval_loss`.
        """
        steps, values = self.series(name)
        known = dict(zip(steps, values, strict=True))
        before, after = (self.results.get(moment, {}).get(name) for moment in ("before", "after"))
        if _is_number(before):
            known.setdefault(0.0, float(before))
        if _is_number(after):
            best = self.results.get("best_checkpoint")
            end = self.results["num_steps"] if best is None else checkpoint_step(Path(best))
            known.setdefault(float(end), float(after))
        return sorted(known), [known[step] for step in sorted(known)]


def read_run_log(folder: Path) -> RunLog:
    """Read a run's log: its final one, or that of its newest checkpoint if that is newer.

    Args:
        folder: Folder of the run, the `--output_dir` of `slivertune train` or of any Trainer.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If the run has no log, or a damaged one.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder. Name that of a run, such as runs/hift")
    sources = [path / TRAINER_STATE_NAME for path in (*checkpoint_folders(folder), folder)]
    found = [(_read_state(path), path) for path in sources if path.is_file()]
    if not found:
        raise ValueError(
            f"{folder} has no log: neither a {TRAINER_STATE_NAME} nor a checkpoint with one. Wait until the run has "
            "written its first checkpoint, or has ended"
        )
    state, source = max(found, key=lambda pair: pair[0]["global_step"])
    entries = [entry for entry in state["log_history"] if _is_number(entry.get("step"))]
    results = read_results(folder) or {}
    if results and results["num_steps"] < state["global_step"]:
        results = {}  # the run was resumed since
    return RunLog(folder=folder, source=source, entries=entries, results=results)


def write_run_log(state: TrainerState, folder: Path) -> Path:
    """Write a run's log atomically to the place from which `read_run_log` reads it.

    Args:
        state: State of the Trainer.
        folder: Folder of the run.

    Returns:
        Path of the file.
    """
    path = folder / TRAINER_STATE_NAME
    with atomic.atomic_file(path) as temporary:
        state.save_to_json(str(temporary))
    return path


def _read_state(path: Path) -> Mapping[str, Any]:
    try:
        state: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read ({error}). Move it away to go on") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    is_history = isinstance(history, list) and all(isinstance(entry, dict) for entry in history)
    if not is_history or type(state.get("global_step")) is not int:
        raise ValueError(
            f"{path} can't be read: a Trainer's state has a number as its global_step and a list of dictionaries as "
            "its log_history. Move it away to go on"
        )
    return dict(state)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
