"""`compare.json`: what a comparison has measured so far, so that the same command goes on where it stopped."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slivertune.core import atomic
from slivertune.training.comparison.outcome import Outcome
from slivertune.training.comparison.trial import Trial

RECORD_NAME = "compare.json"


class Record:
    """The file of a comparison; written anew, aside and renamed, whenever something is known.

    Args:
        folder: Of the comparison.

    Raises:
        ValueError: If there is a file that can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / RECORD_NAME
        self._values = self._read()

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"trials": {}, "runs": {}}
        try:
            values: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return empty
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} can't be read ({error}); move it away, or name another folder") from error
        if not isinstance(values, dict) or not all(isinstance(values.get(name), dict) for name in empty):
            raise ValueError(f"{self.path} is no record of a comparison; move it away, or name another folder")
        return values

    def write(self) -> None:
        """Write what is known."""
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self.path, self._values)

    def describe(self, values: Mapping[str, Any]) -> None:
        """Keep what was asked for and what is said of it, in place of what was kept before."""
        self._values |= values
        self.write()

    def trial(self, name: str, words: Sequence[str]) -> Trial | None:
        """What was measured of a trial; None where it was not.

        Args:
            name: Of the trial.
            words: Its command.

        Raises:
            ValueError: If a trial of that name had another command.
        """
        found = self._find("trials", name, words)
        return None if found is None else Trial(**found["measured"])

    def keep_trial(self, name: str, words: Sequence[str], trial: Trial) -> None:
        """Keep what was measured."""
        self._values["trials"][name] = {"command": list(words), "measured": asdict(trial)}
        self.write()

    def outcome(self, name: str, words: Sequence[str]) -> Outcome | None:
        """What a run came to; None where it has not ended.

        Args:
            name: Of the run.
            words: Its command.

        Raises:
            ValueError: If a run of that name had another command.
        """
        found = self._find("runs", name, words)
        return None if found is None else Outcome(**found["outcome"])

    def keep_outcome(self, name: str, words: Sequence[str], outcome: Outcome) -> None:
        """Keep what a run came to."""
        self._values["runs"][name] = {"command": list(words), "outcome": asdict(outcome)}
        self.write()

    def _find(self, kind: str, name: str, words: Sequence[str]) -> Any:
        found = self._values[kind].get(name)
        if found is not None and found["command"] != list(words):
            raise ValueError(
                f"{self.path} has {name!r} by another command, {shlex.join(found['command'])}, and this would be "
                f"{shlex.join(words)}; their figures don't belong in one table: name another --output_dir, or give the "
                "old settings"
            )
        return found
