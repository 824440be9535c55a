"""Which columns of a dataset are read, and which of its rows can be."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np

from slivertune.core.suggestions import close_names
from slivertune.training.options.arguments import DataArguments

logger = logging.getLogger(__name__)

ROW_COLUMN = "__row__"
"""A row's number in the split it was read from, from 0; shuffling keeps it, so that errors can name the row."""

LABEL_COLUMN = "__label__"
"""Class number of a row, beside whatever columns the data has."""

TEXT_COLUMNS = ("text", "sentence", "content")
"""Names of a column that is a text."""

# Beside one of these a single text column is only half of what a row says.
_SECOND_TEXTS = frozenset(
    (
        "question", "question1", "question2", "sentence1", "sentence2", "premise", "hypothesis", "text1", "text2",
        "text_pair",
    )
)  # fmt: skip
NUM_NAMED_ROWS = 5
"""How many rows a message names."""


def number_rows(rows: Any) -> Any:
    """Give a `datasets.Dataset` its row numbers, unless it has them."""
    return rows if ROW_COLUMN in rows.column_names else rows.add_column(ROW_COLUMN, np.arange(len(rows)))


def user_columns(rows: Any) -> list[str]:
    """The columns of a `datasets.Dataset` that came with the data."""
    return [name for name in rows.column_names if name not in (ROW_COLUMN, LABEL_COLUMN)]


def column_values(rows: Any, column: str) -> list[Any]:
    """All values of a column in one piece; iterating over the column would fetch row by row."""
    return list(rows[column][:])


def iterate_values(rows: Any, column: str) -> Iterator[Any]:
    """Iterate over a column's values, 1,000 in memory at a time, since all texts may be more than there is room for."""
    for batch in rows.select_columns([column]).iter(batch_size=1000):
        yield from batch[column]


def count_line(count: int, num_rows: int, split: str, line: str) -> str:
    """Say of how many rows of a split a line holds."""
    return f"{count:,} of {num_rows:,} {split} rows: {line}"


def name_rows(rows: Any, places: Any) -> str:
    """The first few of the row numbers at some places of a numbered `datasets.Dataset`, in order, for messages."""
    numbers = sorted(set(column_values(rows.select(places), ROW_COLUMN)))
    first = ", ".join(str(number) for number in numbers[:NUM_NAMED_ROWS])
    more = ", ..." if len(numbers) > NUM_NAMED_ROWS else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {first}{more}, counted from 0"


def describe_rows(rows: Any, places: Any, fault: str, split: str) -> str:
    """Say how many rows of a numbered split have a fault, and which they are."""
    return f"{len(places)} of {len(rows)} rows of the {split} split {fault} ({name_rows(rows, places)})"


def require_column(rows: Any, name: str, option: str, *, text: bool = True) -> str:
    """Check that a column is there and, where asked, that it holds text.

    Args:
        rows: A `datasets.Dataset`.
        name: The column.
        option: The command-line option that names it.
        text: Whether its values must be strings.

    Returns:
        `name`.

    Raises:
        ValueError: If the column is absent, listing those there are, or holds something else than text.
    """
    there = user_columns(rows)
    if name not in there:
        meant = "".join(f" (did you mean {each!r}?)" for each in close_names(name, there)[:1])
        raise ValueError(
            f"{option} names the column {name!r}, which is not in the dataset{meant}; its columns are "
            f"{', '.join(there)} (if these are data, the file has no header line: name its columns with --column_names)"
        )
    feature = rows.features[name]
    if text and not (isinstance(feature, datasets.Value) and "string" in feature.dtype):
        raise ValueError(f"column {name!r} holds {feature}, not text; choose another with {option}")
    return name


def sentence_columns(arguments: DataArguments, rows: Any) -> tuple[str, ...]:
    """Take the named text columns for classification, one or two, or the only sensible one.

    Args:
        arguments: May name `text_column` and `text_pair_column`.
        rows: A `datasets.Dataset`.

    Returns:
        The columns; what was guessed is logged.

    Raises:
        ValueError: If a named column is absent, or none is named and the choice is not plain.
    """
    if arguments.text_column is not None:
        columns = [require_column(rows, arguments.text_column, "--text_column")]
    else:
        there = user_columns(rows)
        columns = [name for name in TEXT_COLUMNS if name in there]
        pairs = [] if arguments.text_pair_column is not None else sorted(_SECOND_TEXTS.intersection(there))
        if len(columns) != 1 or pairs:
            found = [(name,) for name in (*columns, *pairs)]
            raise ValueError(ambiguous(there, found, "--text_column (and --text_pair_column for pairs)"))
        require_column(rows, columns[0], "--text_column")
        logger.info("classifying the text column %r of %s", columns[0], there)
    if arguments.text_pair_column is not None:
        columns.append(require_column(rows, arguments.text_pair_column, "--text_pair_column"))
    return tuple(columns)


def label_column(arguments: DataArguments, rows: Any) -> str:
    """Take the named label column, or `label`.

    Raises:
        ValueError: If the column is absent.
    """
    if arguments.label_column is not None:
        return require_column(rows, arguments.label_column, "--label_column", text=False)
    there = user_columns(rows)
    if "label" not in there:
        raise ValueError(ambiguous(there, [], "--label_column"))
    logger.info("class labels from column %r of %s", "label", there)
    return "label"


def first_rows(rows: Any, columns: Iterable[str], arguments: DataArguments, *, split: str) -> Any:
    """The first so many rows of a split, which must have the columns that are read.

    Args:
        rows: A numbered `datasets.Dataset`.
        columns: Those chosen from the training split.
        arguments: How many rows of each split to use at most.
        split: "train" or "eval".

    Raises:
        ValueError: If a column is absent, listing those there are.
    """
    for name in columns:
        if name not in rows.column_names:
            raise ValueError(
                f"the {split} split has no column {name!r}, which the train split has; its columns are "
                f"{', '.join(user_columns(rows))}"
            )
    limit = arguments.max_train_samples if split == "train" else arguments.max_eval_samples
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


def usable_rows(rows: Any, columns: Iterable[str], arguments: DataArguments, *, split: str) -> Any:
    """The rows of a split that a run reads: the first so many, without those in which a column says nothing.

    A column says nothing where it is null or only white space. Held-out splits were shuffled when they were drawn, so
    that the first rows are as good as any.

    Args:
        rows: A numbered `datasets.Dataset`.
        columns: Those chosen from the training split; all must say something.
        arguments: How many rows of each split to use at most, and whether to leave out empty ones, and say how many,
            in place of an error.
        split: "train" or "eval".

    Returns:
        The rows that say something.

    Raises:
        ValueError: If a column is absent, listing those there are; or there are empty rows and they are not to be left
            out, or nothing is left.
    """
    columns = list(dict.fromkeys(columns))
    rows = first_rows(rows, columns, arguments, split=split)
    is_blank = np.array([_blank_places(rows, name) for name in columns])
    named = ", ".join(repr(name) for name, marks in zip(columns, is_blank, strict=True) if marks.any())
    return leave_out(
        rows,
        is_blank.any(axis=0),
        f"have nothing in column {named}",
        split=split,
        skip=arguments.skip_empty_rows,
        way_out="fill them, or leave them out with --skip_empty_rows (a txt file with blank lines may rather want "
        "--sample_by paragraph)",
    )


def leave_out(
    rows: Any,
    is_unfit: Any,
    fault: str,
    *,
    split: str,
    skip: bool,
    way_out: str,
    none_left: str = "no row is left",
) -> Any:
    """Refuse or leave out rows that a run can't use.

    Args:
        rows: A numbered `datasets.Dataset`.
        is_unfit: Which of them, one truth value a row; where there is none, nothing is said.
        fault: What is wrong with them, as in "3 of 6 rows of the train split are empty".
        split: Name of the split, for messages.
        skip: Leave such rows out, and say how many, in place of an error.
        way_out: What to do about it.
        none_left: What is said where all rows are so.

    Returns:
        The others.

    Raises:
        ValueError: If `skip` is off, or nothing is left.
    """
    if not is_unfit.any():
        return rows
    found = describe_rows(rows, np.flatnonzero(is_unfit), fault, split)
    if not skip:
        raise ValueError(f"{found}; {way_out}")
    if is_unfit.all():
        raise ValueError(f"{found}; {none_left}")
    logger.warning("%s; they are left out", found)
    return rows.select(np.flatnonzero(~is_unfit))


def _blank_places(rows: Any, column: str) -> list[bool]:
    return [value is None or not str(value).strip() for value in iterate_values(rows, column)]


def ambiguous(there: Sequence[str], choices: Sequence[tuple[str, ...]], options: str) -> str:
    """Say that columns leave no plain choice.

    Args:
        there: The dataset's columns.
        choices: What they could be; none, or more than one.
        options: The options that say it.
    """
    found = " or ".join("+".join(choice) for choice in choices)
    rule = f"could be {found}" if len(choices) > 1 else "give no plain choice"
    return f"the dataset's columns ({', '.join(there)}) {rule}; name what to read with {options}"
