"""Choice of the columns to read from a dataset, and of the rows that can be used."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np

from slivertune.core.suggestions import close_names
from slivertune.training.options.arguments import DataArguments

logger = logging.getLogger(__name__)

ROW_COLUMN = "__row__"
"""Number of a row in its original split, from 0. Shuffling keeps it, so that errors can name the row."""

LABEL_COLUMN = "__label__"
"""Name of the column with a row's class number, beside the columns of the data."""

TEXT_COLUMNS = ("text", "sentence", "content")
"""Usual names of a text column."""

# If one of these columns is present, a single text column is only half of the row.
_SECOND_TEXTS = frozenset(
    (
        "question", "question1", "question2", "sentence1", "sentence2", "premise", "hypothesis", "text1", "text2",
        "text_pair",
    )
)  # fmt: skip
NUM_NAMED_ROWS = 5
"""Maximum number of rows that a message names."""


def number_rows(rows: Any) -> Any:
    """Add row numbers to a `datasets.Dataset`, unless it has them."""
    return rows if ROW_COLUMN in rows.column_names else rows.add_column(ROW_COLUMN, np.arange(len(rows)))


def user_columns(rows: Any) -> list[str]:
    """Return the columns of a `datasets.Dataset` that came with the data."""
    return [name for name in rows.column_names if name not in (ROW_COLUMN, LABEL_COLUMN)]


def column_values(rows: Any, column: str) -> list[Any]:
    """Return all values of a column at once. Iterating over the column would fetch them row by row."""
    return list(rows[column][:])


def iterate_values(rows: Any, column: str) -> Iterator[Any]:
    """Iterate over the values of a column, 1,000 at a time, since a column of texts may not fit in memory."""
    for batch in rows.select_columns([column]).iter(batch_size=1000):
        yield from batch[column]


def count_line(count: int, num_rows: int, split: str, line: str) -> str:
    """Prefix a line with the number of rows of a split that it applies to."""
    return f"{count:,} of {num_rows:,} {split} rows: {line}"


def name_rows(rows: Any, places: Any) -> str:
    """List the first row numbers at some positions of a numbered `datasets.Dataset`, sorted, for messages."""
    numbers = sorted(set(column_values(rows.select(places), ROW_COLUMN)))
    first = ", ".join(str(number) for number in numbers[:NUM_NAMED_ROWS])
    more = ", ..." if len(numbers) > NUM_NAMED_ROWS else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {first}{more}, counted from 0"


def describe_rows(rows: Any, places: Any, fault: str, split: str) -> str:
    """Describe a fault of a numbered split, with the number of faulty rows and the first of their row numbers."""
    return f"{len(places)} of {len(rows)} rows of the {split} split {fault} ({name_rows(rows, places)})"


def require_column(rows: Any, name: str, option: str, *, text: bool = True) -> str:
    """Check that a column exists and, if `text` is set, that it holds text.

    Args:
        rows: A `datasets.Dataset`.
        name: Name of the column.
        option: Command-line option that names the column.
        text: Whether the values must be strings.

    Returns:
        `name`.

    Raises:
        ValueError: If the column is absent (the message lists the existing ones) or does not hold text.
    """
    there = user_columns(rows)
    if name not in there:
        meant = "".join(f" (did you mean {each!r}?)" for each in close_names(name, there)[:1])
        raise ValueError(
            f"{option} names the column {name!r}, which is not in the dataset{meant}. Name one of its columns: "
            f"{', '.join(there)} (if these are data, the file has no header line: name its columns with --column_names)"
        )
    feature = rows.features[name]
    kind = feature.dtype if isinstance(feature, datasets.Value) else ""
    if text and kind.startswith(("date", "time")):
        raise ValueError(
            f"column {name!r} holds {feature}, not text, as texts such as 2031-03-07 become in json files of the hub. "
            f"Write the rows to a local json or csv file, where they stay text, or choose another column with {option}"
        )
    if text and "string" not in kind:
        raise ValueError(f"column {name!r} holds {feature}, not text. Choose another with {option}")
    return name


def require_text_of_evaluation(rows: Any, names: Iterable[str]) -> None:
    """Check that columns which hold text in the training split hold text in an evaluation split, too.

    Args:
        rows: Evaluation split, a `datasets.Dataset`.
        names: Names of the columns. Absent ones are passed over.

    Raises:
        ValueError: If one of them does not hold text.
    """
    for name in names:
        if name in rows.column_names:
            require_column(rows, name, "--eval_file or --eval_split")


def sentence_columns(arguments: DataArguments, rows: Any) -> tuple[str, ...]:
    """Choose one or two text columns for classification: the named ones, or the only plausible one.

    Args:
        arguments: Settings that may name `text_column` and `text_pair_column`.
        rows: A `datasets.Dataset`.

    Returns:
        The columns. A guessed column is logged.

    Raises:
        ValueError: If a named column is absent, or if none is named and the choice is ambiguous.
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
    """Choose the label column: the named one, or `label`.

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
    """Select the first rows of a split, up to the limit in the arguments.

    Args:
        rows: A numbered `datasets.Dataset`.
        columns: Columns chosen from the training split. The split must have them, too.
        arguments: Settings with the maximum number of rows per split.
        split: Name of the split, "train" or "eval".

    Raises:
        ValueError: If a column is absent. The message lists the existing ones.
    """
    for name in columns:
        if name not in rows.column_names:
            raise ValueError(
                f"the {split} split has no column {name!r}, which the train split has. Rename its columns "
                f"({', '.join(user_columns(rows))}) like those of the train split"
            )
    limit = arguments.max_train_samples if split == "train" else arguments.max_eval_samples
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


def usable_rows(rows: Any, columns: Iterable[str], arguments: DataArguments, *, split: str) -> Any:
    """Select the rows of a split that a run reads: the first rows up to a limit, without rows with a blank column.

    A column is blank if it is null or only white space. Held-out splits were shuffled when they were drawn, so the
    first rows are as good as any.

    Args:
        rows: A numbered `datasets.Dataset`.
        columns: Columns chosen from the training split. None of them may be blank.
        arguments: Settings with the maximum number of rows per split. They also say whether blank rows are skipped, and
            their number logged, instead of raising an error.
        split: Name of the split, "train" or "eval".

    Returns:
        The rows without blank columns.

    Raises:
        ValueError: If a column is absent (the message lists the existing ones), if rows are blank and may not be
            skipped, or if no row is left.
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
        way_out="Fill them, or leave them out with --skip_empty_rows (a txt file with blank lines may rather want "
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
    none_left: str = "No row is left",
) -> Any:
    """Reject or skip rows that a run can't use.

    Args:
        rows: A numbered `datasets.Dataset`.
        is_unfit: One bool per row, True for a row that can't be used. If none is True, nothing is logged.
        fault: Description of the fault, such as "are empty" in "3 of 6 rows of the train split are empty".
        split: Name of the split, for messages.
        skip: Whether to skip such rows and log their number instead of raising an error.
        way_out: Remedy, for the message.
        none_left: End of the message if all rows are unfit.

    Returns:
        The other rows.

    Raises:
        ValueError: If rows are unfit and `skip` is off, or if no row is left.
    """
    if not is_unfit.any():
        return rows
    found = describe_rows(rows, np.flatnonzero(is_unfit), fault, split)
    if not skip:
        raise ValueError(f"{found}. {way_out}")
    if is_unfit.all():
        raise ValueError(f"{found}. {none_left}")
    logger.warning("%s; they are left out", found)
    return rows.select(np.flatnonzero(~is_unfit))


def _blank_places(rows: Any, column: str) -> list[bool]:
    return [value is None or not str(value).strip() for value in iterate_values(rows, column)]


def ambiguous(there: Sequence[str], choices: Sequence[tuple[str, ...]], options: str) -> str:
    """Describe columns that leave no clear choice.

    Args:
        there: Columns of the dataset.
        choices: Possible choices: none, or more than one.
        options: Options that name the columns to read.
    """
    found = " or ".join("+".join(choice) for choice in choices)
    rule = f"could be {found}" if len(choices) > 1 else "give no plain choice"
    return f"the dataset's columns ({', '.join(there)}) {rule}. Name what to read with {options}"
