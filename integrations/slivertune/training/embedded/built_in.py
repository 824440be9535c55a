"""Built-in datasets, by the names that `--dataset` takes. They need no file and no network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DATES = "builtin:dates"
"""Name of the dates to write out, on which `slivertune train` trains by default."""
REFERENCE = "builtin:python-reference"
"""Name of Python's language reference, on which `slivertune compare` trains by default."""
PREFIX = "builtin:"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltInDataset:
    """A dataset that every machine has."""

    load: Callable[[], Any]
    """Function that returns a `datasets.DatasetDict` with `train` and `eval`.

    It raises RuntimeError if this Python comes without the texts."""
    defaults: Mapping[str, Any]
    """Defaults of options of `slivertune train` on this dataset."""
    has_answers: bool = False
    """Whether each row has one right response, so that rows with a right answer are counted."""


def _dates() -> Any:
    from slivertune.training.embedded.dates import date_splits

    return date_splits()


def _reference() -> Any:
    from slivertune.training.embedded.corpus import reference_splits

    return reference_splits()


BUILT_IN: Mapping[str, BuiltInDataset] = {
    DATES: BuiltInDataset(
        load=_dates,
        defaults={
            "max_steps": 800,
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 64,
            "save_steps": 400,
            "max_length": 32,
        },
        has_answers=True,
    ),
    # Its texts are long, so they are packed.
    REFERENCE: BuiltInDataset(
        load=_reference,
        defaults={
            "max_steps": 480,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 16,
            "save_steps": 160,
            "packing": True,
            "max_length": 256,
            "sample_prompt": 'The "while" statement is used for',
        },
    ),
}


def built_in_of(names: list[str] | None) -> BuiltInDataset | None:
    """Return the built-in dataset that a run trains on, or None if it trains on another, or on several.

    Args:
        names: Value of `--dataset`. None is the default.
    """
    names = [DATES] if names is None else names
    return BUILT_IN.get(names[0]) if len(names) == 1 else None


def counts_answers(names: list[str] | None, task: str, *, is_packed: bool) -> bool:
    """Return whether a run counts the evaluation rows that are answered right.

    Args:
        names: Value of `--dataset`.
        task: Value of `--task`.
        is_packed: Whether rows are packed, so that a row has no single answer.
    """
    built_in = built_in_of(names)
    return built_in is not None and built_in.has_answers and task == "causal_lm" and not is_packed


def check_built_in(name: str) -> None:
    """Refuse a name that begins as those of built-in datasets and is none.

    Args:
        name: A name in `--dataset`.

    Raises:
        ValueError: If it is refused. The message has the names that there are.
    """
    if name.startswith(PREFIX) and name not in BUILT_IN:
        raise ValueError(f"dataset {name!r} is not built in. Use {' or '.join(BUILT_IN)}")
