"""Comparison of a resumed run's settings with the facts in its checkpoint, which an older version may have written."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

_INSTEAD = "start again without --resume_from_checkpoint"
_ROWS_LOOKED_AT = 1000
_OFF = (None, False)
"""Values of a setting that is off. 0 is one of them, too."""


def check_facts(
    checkpoint: Path, saved: Mapping[str, Any], asked: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Refuse to resume a run with other settings than it had.

    A setting that the checkpoint does not know had its default, since it came with a later version. A setting that
    this version does not know must be off.

    Args:
        checkpoint: Checkpoint of the run, for the error.
        saved: Facts of the checkpoint. A fact may be a mapping of settings.
        asked: Facts of the run that resumes it.
        defaults: Defaults of the method's settings, by name.

    Raises:
        ValueError: If a setting differs. The message has all differences of one fact.
    """
    for name, ours in asked.items():
        theirs = saved.get(name)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            unknown = {key: value for key, value in theirs.items() if key not in ours and value not in _OFF}
            if unknown:
                raise ValueError(
                    f"{checkpoint} was trained with {name}={unknown}, which this version does not have. Continue with "
                    f"the version of slivertune that wrote it, or {_INSTEAD}"
                )
            theirs = {key: theirs.get(key, defaults.get(key)) for key in ours}
            differing = [key for key, value in ours.items() if theirs[key] != value]
            theirs, ours = ({key: each[key] for key in differing} for each in (theirs, ours))
        if theirs != ours:
            raise ValueError(
                f"{checkpoint} was trained with {name}={theirs}, and this run asks for {name}={ours}. Repeat the first "
                f"run's settings{_typed(theirs, defaults)}, or {_INSTEAD}"
            )


def describe_rows(rows: Any) -> str | None:
    """Return the number of prepared rows and a hash of at most 1,000 of them. None if that is not possible.

    Args:
        rows: Rows of a split. A task of another package may have rows without a number, and these are not described.
    """
    if not isinstance(rows, datasets.Dataset) or not len(rows):
        return None
    digest = hashlib.sha256()
    some = rows.with_format("arrow").select(range(0, len(rows), -(-len(rows) // _ROWS_LOOKED_AT)))
    for batch in some.iter(batch_size=100):
        digest.update(repr(sorted(batch.to_pydict().items())).encode())
    return f"{len(rows)} rows, {digest.hexdigest()[:16]}"


def check_rows(checkpoint: Path | None, facts: dict[str, Any], splits: Mapping[str, Any]) -> None:
    """Refuse to resume a run on other rows, and note the rows among the facts.

    Args:
        checkpoint: Checkpoint of the run; None for a run that begins.
        facts: Facts of the run, which one of an older version has without its rows.
        splits: Prepared rows by name of the split.

    Raises:
        ValueError: If rows of a split differ.
    """
    found = {split: describe_rows(rows) for split, rows in splits.items()}
    known = facts.setdefault("rows", found)
    differing = [split for split, rows in found.items() if known.get(split) != rows]
    if differing:
        raise ValueError(
            f"{checkpoint} was trained with other {' and '.join(differing)} rows ({known}) than this run reads "
            f"({found}). Give the data and the options of the first run, or {_INSTEAD}"
        )


def _typed(theirs: Any, defaults: Mapping[str, Any]) -> str:
    """Return the options that repeat the settings of a fact, if it is a mapping of options."""
    known = theirs if isinstance(theirs, dict) else {}
    words = [
        f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in known.items()
        if name in defaults and value is not None
    ]
    return f" ({' '.join(words)})" if words else ""
