"""Which columns of a dataset are read, and which of its rows can be."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from slivertune.training.options.data import DataArguments

logger = logging.getLogger(__name__)

ROW_COLUMN = "__row__"
"""A row's number in the split it was read from, from 0; shuffling keeps it, so that errors can name the row."""

LABEL_COLUMN = "__label__"
"""Class number of a row, beside whatever columns the data has."""

_TEXTS = ("text", "sentence", "content")
_PROMPTS_AND_RESPONSES = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("mr", "ref"))
# Beside one of these a single text column is only half of what a row says.
_SECOND_TEXTS = frozenset(
    (
        "question",
        "question1",
        "question2",
        "sentence1",
        "sentence2",
        "premise",
        "hypothesis",
        "text1",
        "text2",
        "text_pair",
    )
)
NUM_NAMED_ROWS = 5
"""How many rows a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalColumns:
    """The columns of a language-modelling dataset: texts, or prompts and responses."""

    text: str | None = None
    prompt: str | None = None
    response: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read, in the order in which a row is built."""
        return tuple(name for name in (self.text, self.prompt, self.response) if name is not None)


def number_rows(rows: Any) -> Any:
    """Give a `datasets.Dataset` its row numbers, unless it has them."""
    if ROW_COLUMN in rows.column_names:
        return rows
    return rows.add_column(ROW_COLUMN, np.arange(len(rows)))


def first_rows(rows: Any, limit: int | None) -> Any:
    """The first `limit` rows of a `datasets.Dataset`, or all; held-out splits were shuffled when they were drawn."""
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


def user_columns(rows: Any) -> list[str]:
    """The columns of a `datasets.Dataset` that came with the data."""
    return [name for name in rows.column_names if name not in (ROW_COLUMN, LABEL_COLUMN)]


def column_values(rows: Any, column: str) -> list[Any]:
    """All values of a column in one piece; iterating over the column would fetch row by row."""
    values: list[Any] = rows[column][:]
    return values


def name_rows(numbers: Sequence[int]) -> str:
    """The first few row numbers in order, for messages."""
    numbers = sorted(numbers)
    first = ", ".join(str(number) for number in numbers[:NUM_NAMED_ROWS])
    return f"{'row' if len(numbers) == 1 else 'rows'} {first}{', ...' if len(numbers) > NUM_NAMED_ROWS else ''}"


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
        raise ValueError(
            f"{option} names the column {name!r}, which is not in the dataset; its columns are {', '.join(there)} "
            "(if these are data, the file has no header line: name its columns with --column_names)"
        )
    feature = rows.features[name]
    if text and not (isinstance(feature, datasets.Value) and "string" in feature.dtype):
        raise ValueError(f"column {name!r} holds {feature}, not text; choose another with {option}")
    return name


def require_columns(rows: Any, names: Iterable[str], split: str) -> None:
    """Check that a split has the columns that were chosen from the training split.

    Raises:
        ValueError: If one is absent, listing those there are.
    """
    for name in names:
        if name not in rows.column_names:
            raise ValueError(
                f"the {split} split has no column {name!r}, which the train split has; its columns are "
                f"{', '.join(user_columns(rows))}"
            )


def causal_columns(arguments: DataArguments, rows: Any) -> CausalColumns:
    """Take the named columns for language modelling, or the only sensible ones.

    Args:
        arguments: May name `text_column`, or `prompt_column` and `response_column`.
        rows: A `datasets.Dataset`.

    Returns:
        The columns; what was guessed is logged.

    Raises:
        ValueError: If a named column is absent, or none is named and the choice is not plain.
    """
    if arguments.prompt_column is not None and arguments.response_column is not None:
        return CausalColumns(
            prompt=require_column(rows, arguments.prompt_column, "--prompt_column"),
            response=require_column(rows, arguments.response_column, "--response_column"),
        )
    if arguments.text_column is not None:
        return CausalColumns(text=require_column(rows, arguments.text_column, "--text_column"))
    there = user_columns(rows)
    found = [CausalColumns(text=name) for name in (there if len(there) == 1 else _TEXTS) if name in there]
    for prompt, response in _PROMPTS_AND_RESPONSES:
        # Alpaca's `input` belongs to the prompt as well.
        whole = prompt != "instruction" or "input" not in there
        if prompt in there and response in there and whole:
            found.append(CausalColumns(prompt=prompt, response=response))
    if len(found) != 1:
        raise ValueError(
            _ambiguous(
                there, [choice.names for choice in found], "--text_column, or --prompt_column and --response_column"
            )
        )
    for name in found[0].names:
        require_column(rows, name, "--text_column" if found[0].text else "--prompt_column and --response_column")
    if found[0].text:
        logger.info("training on the text column %r of %s", found[0].text, there)
    else:
        logger.info("prompts from column %r, responses from column %r of %s", found[0].prompt, found[0].response, there)
    return found[0]


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
    there = user_columns(rows)
    if arguments.text_column is not None:
        columns = [require_column(rows, arguments.text_column, "--text_column")]
    else:
        columns = [name for name in _TEXTS if name in there]
        pairs = [] if arguments.text_pair_column is not None else sorted(_SECOND_TEXTS.intersection(there))
        if len(columns) != 1 or pairs:
            choices = [(name,) for name in (*columns, *pairs)]
            raise ValueError(_ambiguous(there, choices, "--text_column (and --text_pair_column for pairs)"))
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
        raise ValueError(_ambiguous(there, [], "--label_column"))
    logger.info("class labels from column %r of %s", "label", there)
    return "label"


def drop_empty_rows(rows: Any, columns: Iterable[str], *, split: str, skip: bool) -> Any:
    """Refuse or leave out rows in which a column is null or only white space.

    Args:
        rows: A numbered `datasets.Dataset`.
        columns: The columns that must say something.
        split: Name of the split, for messages.
        skip: Leave such rows out, and say how many, in place of an error.

    Returns:
        The rows that say something.

    Raises:
        ValueError: If there are empty rows and `skip` is off, or nothing is left.
    """
    columns = list(dict.fromkeys(columns))
    is_blank = np.array(
        [
            [_is_blank(value) for batch in rows.select_columns([name]).iter(batch_size=1000) for value in batch[name]]
            for name in columns
        ]
    )
    is_empty = is_blank.any(axis=0)
    if not is_empty.any():
        return rows
    named = ", ".join(repr(name) for name, marks in zip(columns, is_blank, strict=True) if marks.any())
    numbers = column_values(rows.select(np.flatnonzero(is_empty)), ROW_COLUMN)
    found = (
        f"{len(numbers)} of {len(rows)} rows of the {split} split have nothing in column {named} "
        f"({name_rows(numbers)}, counted from 0)"
    )
    if not skip:
        raise ValueError(
            f"{found}; fill them, or leave them out with --skip_empty_rows (a txt file with blank lines may "
            "rather want --sample_by paragraph)"
        )
    if is_empty.all():
        raise ValueError(f"{found}; no row is left")
    logger.warning("%s; they are left out", found)
    return rows.select(np.flatnonzero(~is_empty))


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _ambiguous(there: list[str], choices: Sequence[tuple[str, ...]], options: str) -> str:
    found = " or ".join("+".join(choice) for choice in choices)
    rule = f"could be {found}" if len(choices) > 1 else "give no plain choice"
    return f"the dataset's columns ({', '.join(there)}) {rule}; name what to read with {options}"
