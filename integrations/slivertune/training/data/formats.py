"""Formats of language-modelling rows, detected by their columns. Errors list the known formats."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import datasets

from slivertune.core.suggestions import closest
from slivertune.training.data.columns import TEXT_COLUMNS, ambiguous, require_column, user_columns
from slivertune.training.data.json_rows import JsonValue
from slivertune.training.data.turn_weights import KEYS as TURN_WEIGHTS
from slivertune.training.options.arguments import DataArguments, FormatName

_PAIRS = (("mr", "ref"),)
_COMPARED = frozenset(("chosen", "rejected"))
# Beside a known format, such a column is part of the input that the answer depends on.
_ALSO_MEANT = ("context", "passage", "choices", "options", "history", "system", "system_prompt", "loss_mask")
_ROWS_LOOKED_AT = 100
_KEYS = (frozenset(("role",)), frozenset(("from", "value")))
"""Keys of a message: OpenAI's (`content` may be absent beside tool calls), and ShareGPT's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFormat:
    """Format of the rows of a dataset.

    Args:
        name: One of `FormatName`; or "text", trained on as a whole; or "prompt_response", two columns that the user
            named or that are a known pair of data and text.
        columns: Required columns. For "prompt_response" and similar formats, the prompt and the response.
        optional: Columns that are read if they are present.
        is_chat: Whether rows are lists of messages instead of strings.
        keeps_nulls: Whether a null in a message is part of the data. If messages are rows of a table, each has the keys
            of all others, with null values.
    """

    name: FormatName | Literal["text", "prompt_response"]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    is_chat: bool = False
    keeps_nulls: bool = False

    @property
    def is_instruction(self) -> bool:
        """Whether rows are a prompt and a response as strings, which a chat template can render as two messages."""
        return not self.is_chat and self.name not in ("text", "prompt_response")

    @property
    def target(self) -> str:
        """Name of the part that carries the loss, in one word."""
        if self.is_chat and self.name != "prompt_completion":
            return "assistant"
        return {"text": "text", "prompt_response": "response"}.get(self.name, self.columns[-1])

    def __str__(self) -> str:
        """Return the title and the columns, for the first lines of a run."""
        title = {
            "messages": "chat",
            "sharegpt": "ShareGPT",
            "alpaca": "Alpaca",
            "prompt_completion": "prompt and completion",
            "question_answer": "question and answer",
            "prompt_response": "prompt and response",
        }.get(self.name, self.name)
        return f"{title} ({', '.join((*self.columns, *self.optional))})"


_KNOWN = (
    DatasetFormat(name="messages", columns=("messages",), optional=("tools",), is_chat=True),
    DatasetFormat(name="sharegpt", columns=("conversations",), optional=("tools",), is_chat=True),
    DatasetFormat(name="alpaca", columns=("instruction", "output"), optional=("input",)),
    DatasetFormat(name="prompt_completion", columns=("prompt", "completion"), optional=("tools",)),
    DatasetFormat(name="prompt_completion", columns=("prompt", "response"), optional=("tools",)),
    DatasetFormat(name="question_answer", columns=("question", "answer")),
)
_NAMES = sorted({*TEXT_COLUMNS, *_COMPARED, "input"}.union(*(known.columns for known in _KNOWN)))
_WAYS_OUT = "--text_column, or --prompt_column and --response_column"
_DESCRIBED = (
    "messages (of role and content), conversations (of from and value), instruction + output (+ input), prompt + "
    "completion, question + answer, text"
)


def find_format(arguments: DataArguments, rows: Any) -> DatasetFormat:
    """Determine the format of a dataset's rows.

    Args:
        arguments: Settings that may name `text_column`, or `prompt_column` and `response_column`, or `dataset_format`.
        rows: A `datasets.Dataset`.

    Returns:
        The named format, or the only one that the columns allow.

    Raises:
        ValueError: If a named column is absent, a column's content does not match the format, the columns allow several
            formats or none, a detected format leaves out an input, or the columns are preferences.
    """
    if arguments.prompt_column is not None and arguments.response_column is not None:
        prompt = require_column(rows, arguments.prompt_column, "--prompt_column")
        return DatasetFormat(
            name="prompt_response",
            columns=(prompt, require_column(rows, arguments.response_column, "--response_column")),
        )
    if arguments.text_column is not None:
        return DatasetFormat(name="text", columns=(require_column(rows, arguments.text_column, "--text_column"),))
    there = user_columns(rows)
    _refuse_preferences(rows, there)
    if arguments.dataset_format is not None:
        return _checked(_named(arguments.dataset_format, there), rows, there)
    found = _candidates(rows, there)
    if len(found) != 1:
        raise ValueError(_no_choice(there, found))
    (only,) = found
    left_out = [name for name in _ALSO_MEANT if name in there]
    if left_out and (only.is_chat or only.is_instruction):
        raise ValueError(
            f"the dataset's columns ({', '.join(there)}) look like {only}, which leaves out {', '.join(left_out)}. "
            f"Move its content into the other columns, or train without it by --dataset_format {only.name}"
        )
    return _checked(only, rows, there)


def with_nulls_of(found: DatasetFormat, rows: Any) -> DatasetFormat:
    """Return the format with `keeps_nulls` as for these rows, since two splits may be stored in two ways.

    Args:
        found: Format of the rows.
        rows: A `datasets.Dataset`.
    """
    read = [name for name in (*found.columns, *found.optional) if name in rows.column_names]
    return replace(found, keeps_nulls=any(_holds_json(rows.features[name]) for name in read))


def unread_columns(found: DatasetFormat, rows: Any) -> list[str]:
    """Return the columns of a `datasets.Dataset` that a format does not read."""
    return [name for name in user_columns(rows) if name not in (*found.columns, *found.optional)]


def unread_keys(found: DatasetFormat, rows: Any, template: str) -> list[str]:
    """Find the keys of messages in the first 100 rows that neither this package nor the chat template reads.

    Args:
        found: Format of the rows.
        rows: A `datasets.Dataset`.
        template: Source of the chat template.
    """
    if not found.is_chat:
        return []
    first = rows.select(range(min(len(rows), _ROWS_LOOKED_AT))).select_columns(list(found.columns))
    messages = [
        each for column in first[:].values() for value in column for each in value or () if isinstance(each, dict)
    ]
    keys = dict.fromkeys(key for each in messages for key, item in each.items() if item is not None)
    known = TURN_WEIGHTS.union(*_KEYS, ("content",))
    return [key for key in keys if key not in known and not re.search(rf"\b{re.escape(key)}\b", template)]


def _candidates(rows: Any, there: Sequence[str]) -> list[DatasetFormat]:
    """Return all formats that the names of the columns allow."""
    found = [known for known in _KNOWN if set(known.columns) <= set(there)]
    found += [DatasetFormat(name="prompt_response", columns=pair) for pair in _PAIRS if set(pair) <= set(there)]
    found += [
        DatasetFormat(name="text", columns=(name,))
        for name in TEXT_COLUMNS
        if name in there and not any(_is_written_out(rows, name, known) for known in found)
    ]
    if not found and len(there) == 1 and _is_text(rows.features[there[0]]):
        return [DatasetFormat(name="text", columns=(there[0],))]
    return found


def _is_written_out(rows: Any, text_column: str, found: DatasetFormat) -> bool:
    """Check whether a text column only joins the columns of a format, as in Stanford's Alpaca."""
    first = rows.select(range(min(len(rows), _ROWS_LOOKED_AT)))
    columns = [first[name][:] for name in found.columns]
    if not all(_is_text(rows.features[name]) for name in (text_column, *found.columns)):
        return False
    return all(
        all((part or "").strip() in (text or "") for part in parts)
        for text, *parts in zip(first[text_column][:], *columns, strict=True)
    )


def _named(name: FormatName, there: Sequence[str]) -> DatasetFormat:
    choices = [known for known in _KNOWN if known.name == name]
    for known in choices:
        if set(known.columns) <= set(there):
            return known
    wanted = " or ".join(" + ".join(known.columns) for known in choices)
    raise ValueError(
        f"dataset_format={name} reads {wanted}, and the dataset's columns are {', '.join(there)}. Rename them, or "
        "leave out --dataset_format"
    )


def _checked(found: DatasetFormat, rows: Any, there: Sequence[str]) -> DatasetFormat:
    """Check a format against the columns, and keep the optional columns that are present and not all null.

    Prompts and completions may be lists of messages, too.
    """
    optional = tuple(name for name in found.optional if name in there and str(rows.features[name]) != "Value('null')")
    found = replace(found, optional=optional)
    if found.name == "prompt_completion" and isinstance(_first_value(rows, found.columns[0]), list):
        found = replace(found, is_chat=True)
    if found.is_chat:
        for name in found.columns:
            _require_messages(rows, name)
    else:
        option = "--text_column" if found.name == "text" else "--prompt_column and --response_column"
        for name in (*found.columns, *(name for name in found.optional if name != "tools")):
            require_column(rows, name, option)
    return with_nulls_of(found, rows)


def _holds_json(feature: Any) -> bool:
    return isinstance(feature, JsonValue) or "Json(" in str(feature)


def _is_text(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and "string" in feature.dtype


def _first_value(rows: Any, column: str) -> Any:
    """Return the first value of a column that is not empty, or None."""
    for batch in rows.select_columns([column]).iter(batch_size=100):
        for value in batch[column]:
            if value:
                return value
    return None


def _require_messages(rows: Any, column: str) -> None:
    value = _first_value(rows, column)
    if value is None:
        raise ValueError(f"column {column!r} has no messages in any row. Name another dataset or --dataset_format")
    first = value[0] if isinstance(value, list) else value
    if not isinstance(value, list) or not isinstance(first, dict) or not any(keys <= first.keys() for keys in _KEYS):
        raise ValueError(
            f"column {column!r} should hold lists of messages, as in "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}] or with from and value, and '
            f"its first value begins {str(value)[:60]!r}. Write the rows in this form, as jsonl or parquet"
        )


def _refuse_preferences(rows: Any, there: Sequence[str]) -> None:
    columns = [name for name in there if name in _COMPARED]
    if {"prompt", "completion", "label"} <= set(there) and str(rows.features["label"]) == "Value('bool')":
        columns = ["completion", "label"]
    if columns:
        raise ValueError(
            f"the columns {' and '.join(columns)} are preferences, and slivertune train does not tune to preferences. "
            "Use TRL's DPOTrainer (KTOTrainer for single labels) with HiFT or SFT by slivertune.attach(trainer, "
            "slivertune.HiFTConfig()), or name the columns to read with --prompt_column and --response_column"
        )


def _no_choice(there: Sequence[str], found: Sequence[DatasetFormat]) -> str:
    """Describe columns that match no format or several, and the options that choose one."""
    choices = [found_one.columns for found_one in found]
    if len(found) > 1:
        names = [each.name for each in found if each.is_chat or each.is_instruction]
        chosen = f", or --dataset_format {' or '.join(names)}" if names else ""
        return ambiguous(there, choices, _WAYS_OUT + chosen)
    near = {name: closest(name, _NAMES, cutoff=0.8) for name in there}
    meant = ", ".join(f"{match!r} by {name!r}" for name, match in near.items() if match is not None and match != name)
    asked = f"; did you mean {meant}? Rename what is misspelt" if meant else ""
    return f"{ambiguous(there, choices, _WAYS_OUT)}. Formats known by their columns are {_DESCRIBED}{asked}"
