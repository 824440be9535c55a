"""`compare.json`: what a comparison has measured so far, so that the same command goes on where it stopped."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from slivertune.core import atomic
from slivertune.core.masking import masked
from slivertune.training.comparison.outcome import Outcome
from slivertune.training.comparison.trial import Trial

RECORD_NAME = "compare.json"
_Measured = TypeVar("_Measured")


class Kept(Generic[_Measured]):
    """What was measured of one kind, by name, each with the command that it came of.

    Args:
        record: Keeps it.
        kind: The name of all of it in the file.
        field: The name of what was measured, beside the command.
        measured_class: Its class.
    """

    def __init__(self, record: "Record", kind: str, field: str, measured_class: type[_Measured]) -> None:
        self._record, self._kind, self._field = record, kind, field
        self._class: Any = measured_class

    def get(self, name: str, words: Sequence[str]) -> _Measured | None:
        """What was measured; None where it was not.

        Args:
            name: Of the run or trial.
            words: Its command.

        Raises:
            ValueError: If one of that name had another command.
        """
        found = self._record.values[self._kind].get(name)
        if found is None:
            return None
        command = masked(list(words))
        if found["command"] != command:
            raise ValueError(
                f"{self._record.path} has {name!r} by another command, {shlex.join(found['command'])}, and this would "
                f"be {shlex.join(command)}; their figures don't belong in one table: name another --output_dir, or "
                "give the old settings"
            )
        measured: _Measured = self._class(**found[self._field])
        return measured

    def keep(self, name: str, words: Sequence[str], measured: _Measured) -> None:
        """Keep what was measured."""
        value: Any = measured
        self._record.values[self._kind][name] = {"command": list(words), self._field: asdict(value)}
        self._record.write()


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
        self.values = self._read()
        """Plain containers, as they are written."""
        self.trials = Kept(self, "trials", "measured", Trial)
        """By row."""
        self.outcomes = Kept(self, "runs", "outcome", Outcome)
        """What runs came to, by run."""

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
        """Write what is known, without secrets."""
        self.values = masked(self.values)
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self.path, self.values)

    def describe(self, values: Mapping[str, Any]) -> None:
        """Keep what was asked for and what is said of it, in place of what was kept before."""
        self.values |= values
        self.write()
