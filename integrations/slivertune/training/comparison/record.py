"""`compare.json`: measurements of a comparison so far, so that the same command continues where it stopped."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from slivertune.core import atomic
from slivertune.core.masking import masked
from slivertune.training.comparison.outcome import Outcome
from slivertune.training.trial import Trial

RECORD_NAME = "compare.json"
_Measured = TypeVar("_Measured")


class Kept(Generic[_Measured]):
    """Measurements of one kind by name, each with its command.

    Args:
        record: Record that stores them.
        kind: Key of this kind in the file.
        field: Key of a measurement, beside its command.
        measured_class: Class of a measurement.
    """

    def __init__(self, record: "Record", kind: str, field: str, measured_class: type[_Measured]) -> None:
        self._record, self._kind, self._field = record, kind, field
        self._class: Any = measured_class

    def get(self, name: str, words: Sequence[str]) -> _Measured | None:
        """Return a measurement, or None if there is none.

        Args:
            name: Name of the run or trial.
            words: Command of the run or trial.

        Raises:
            ValueError: If the record has this name with another command.
        """
        found = self._record.values[self._kind].get(name)
        if found is None:
            return None
        command = masked(list(words))
        if found["command"] != command:
            raise ValueError(
                f"{self._record.path} has {name!r} by another command, {shlex.join(found['command'])}, and this would "
                f"be {shlex.join(command)}. Their figures don't belong in one table. Name another --output_dir, or "
                "give the old settings"
            )
        measured: _Measured = self._class(**found[self._field])
        return measured

    def keep(self, name: str, words: Sequence[str], measured: _Measured, inputs: Mapping[str, str]) -> None:
        """Store a measurement and write the record.

        Args:
            name: Name of the run or trial.
            words: Command of the run or trial.
            measured: The measurement.
            inputs: Hashes of the files that it read, by path.
        """
        value: Any = measured
        self._record.values.setdefault("inputs", {}).update(inputs)
        self._record.values[self._kind][name] = {"command": list(words), self._field: asdict(value)}
        self._record.write()


class Record:
    """Record file of a comparison, written atomically after every measurement.

    Args:
        folder: Folder of the comparison.

    Raises:
        ValueError: If there is a file that can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / RECORD_NAME
        self.values = self._read()
        """Contents of the file, as plain containers."""
        self.trials = Kept(self, "trials", "measured", Trial)
        """Trials by name."""
        self.outcomes = Kept(self, "runs", "outcome", Outcome)
        """Outcomes of runs by name."""

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"trials": {}, "runs": {}}
        try:
            values: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return empty
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} can't be read ({error}). Move it away, or name another folder") from error
        if not isinstance(values, dict) or not all(isinstance(values.get(name), dict) for name in empty):
            raise ValueError(f"{self.path} is no record of a comparison. Move it away, or name another folder")
        return values

    def check_inputs(self, inputs: Mapping[str, str]) -> None:
        """Refuse files that have changed since a measurement read them.

        Args:
            inputs: Hashes of the files by path.

        Raises:
            ValueError: If a hash is another one than in the record.
        """
        known = self.values.get("inputs", {})
        for name, found in inputs.items():
            if known.get(name, found) != found:
                raise ValueError(
                    f"{name} has changed since runs in {self.path} read it. Their figures and those of new runs don't "
                    "belong in one table. Name another --output_dir, put the old contents back, or delete "
                    f"{self.folder}"
                )

    def outcomes_of(self, row: str) -> list[Outcome]:
        """Return the outcomes of a row's runs.

        Args:
            row: Name of the row.
        """
        runs = self.values["runs"]
        return [Outcome(**kept["outcome"]) for name, kept in runs.items() if name.startswith(f"{row}/")]

    def write(self) -> None:
        """Write the record without secrets."""
        self.values = masked(self.values)
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self.path, self.values)

    def describe(self, values: Mapping[str, Any]) -> None:
        """Replace the description of the comparison and of its results, and write the record."""
        self.values |= values
        self.write()
