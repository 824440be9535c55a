"""Conversion of class labels in the data to class numbers."""

import re
from collections.abc import Sequence
from typing import Any

import datasets

from slivertune.training.data.columns import column_values, name_rows
from slivertune.training.data.json_rows import JsonValue

_DECIMAL = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+")
_NUM_NAMED_LABELS = 20


def read_labels(rows: Any, column: str) -> tuple[str, ...]:
    """Collect the labels of the training split.

    A `datasets.ClassLabel` column keeps its own order and names. Integers, also written as text, are sorted by value,
    words by their characters.

    Args:
        rows: Training split, a `datasets.Dataset`.
        column: Label column. Null labels are skipped.

    Returns:
        The labels; label i stands for class i.

    Raises:
        ValueError: If the labels are not integers or words (regression), or fewer than two are different.
    """
    feature = rows.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    values = column_values(rows, column)
    if isinstance(feature, JsonValue):
        are_labels = all(type(value) in (int, str, type(None)) for value in values)  # integers beside words
    else:
        are_labels = isinstance(feature, datasets.Value) and not re.search("float|decimal", feature.dtype)
    if not are_labels:
        _refuse(column, f"{feature}")
    names = [str(value).strip() for value in set(values) if value is not None]
    names = sorted({name for name in names if name})
    if any(_DECIMAL.fullmatch(name) for name in names) and all(_is_number(name) for name in names):
        _refuse(column, f"decimals such as {next(name for name in names if _DECIMAL.fullmatch(name))}")
    if all(re.fullmatch(r"[-+]?\d+", name) for name in names):
        names.sort(key=int)
    if len(names) < 2:
        raise ValueError(
            f"column {column!r} of the train split has the labels {names}, and a classifier needs at least two. Choose "
            "another column with --label_column"
        )
    return tuple(names)


def encode_labels(rows: Any, column: str, labels: Sequence[str], *, split: str) -> list[int]:
    """Convert the labels of a split to class numbers.

    Args:
        rows: A numbered `datasets.Dataset` without null labels.
        column: Label column.
        labels: Labels of the training split, in the order of their class numbers.
        split: Name of the split, for messages.

    Returns:
        One class number per row.

    Raises:
        ValueError: If a label is not in the training split.
    """
    feature, names = rows.features[column], column_values(rows, column)
    if isinstance(feature, datasets.ClassLabel):
        # A hidden label is -1.
        names = [feature.int2str(value) if 0 <= value < feature.num_classes else str(value) for value in names]
    else:
        names = [str(value).strip() for value in names]
    classes = {name: index for index, name in enumerate(labels)}
    unknown = [row for row, name in enumerate(names) if name not in classes]
    if unknown:
        raise ValueError(
            f"column {column!r} of the {split} split holds labels that the train split does not have: "
            f"{_listed(sorted({names[row] for row in unknown}))} ({len(unknown)} rows: {name_rows(rows, unknown)}); "
            f"the train split has {_listed(labels)}. Correct them, or train on rows with every label"
        )
    return [classes[name] for name in names]


def _refuse(column: str, what: str) -> None:
    raise ValueError(
        f"label column {column!r} holds {what}, and regression is not supported: labels are integers or words. Choose "
        "another column with --label_column, or write the classes as such"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_NUM_NAMED_LABELS])
    return listed if len(names) <= _NUM_NAMED_LABELS else f"{listed}, ... ({len(names)} labels)"
