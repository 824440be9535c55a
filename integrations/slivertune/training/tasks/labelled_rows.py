"""Rows with labels on the response or on the assistant's turns, and the choice of rows to drop."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from slivertune.training.data.columns import ROW_COLUMN, column_values, count_line, describe_rows, leave_out
from slivertune.training.data.conversations import UnusableRowError, read_conversation, read_plain
from slivertune.training.data.formats import DatasetFormat
from slivertune.training.data.turn_weights import UnknownWeightError
from slivertune.training.tasks.chat import Encoded, encode_conversation
from slivertune.training.tasks.special_ends import special_ends
from slivertune.training.tasks.tokenization import (
    IGNORED,
    Columns,
    as_columns,
    common_prefix_length,
    leading_special_tokens,
    token_ids,
)

_MOST_REASONS = 5
"""Maximum number of reasons for dropped rows to report, the most frequent first."""


def encode_responses(
    batch: Columns,
    *,
    tokenizer: PreTrainedTokenizerBase,
    found: DatasetFormat,
    separator: str,
    max_length: int,
    truncate: bool,
) -> Columns:
    """Join prompt, separator, response and EOS token in one row, with labels on the response and the EOS token only.

    The row is tokenised in one piece. The response begins where its tokens differ from those of the prompt alone.
    Special tokens of a prompt or a response that the row gets anyway are kept once.

    Args:
        batch: The texts.
        tokenizer: The tokenizer.
        found: Format of the columns.
        separator: Text between prompt and response.
        max_length: Maximum length of a row in tokens.
        truncate: Whether to cut the end of longer rows.

    Returns:
        The batch, row by row. `length` counts tokens before a cut, `num_targets` predicted labels after it. `fault` is
        the reason to drop a row, `unclear` the reason to reject the split, and `remarks` has a line for each change.
    """
    leading, ends = leading_special_tokens(tokenizer), special_ends(tokenizer)

    def encode(row: dict[str, Any], remarks: list[str]) -> list[Encoded]:
        given = read_plain(row, found, separator)
        prompt, response = ends.pair_once(*given)
        if (prompt, response) != given:
            remarks.append(ends.remark)
        ids, prompt_ids = token_ids(tokenizer, [prompt + response, prompt])
        whole = [*leading, *ids, int(tokenizer.eos_token_id)]
        num_silent = len(leading) + common_prefix_length((ids, prompt_ids))
        return [(whole, [*[IGNORED] * num_silent, *whole[num_silent:]])]

    return _encode_each(batch, encode, max_length if truncate else None)


def encode_chats(
    batch: Columns,
    *,
    tokenizer: PreTrainedTokenizerBase,
    found: DatasetFormat,
    max_length: int,
    truncate: bool,
    day: date | None = None,
) -> Columns:
    """Tokenise conversations by the chat template, with labels on the assistant's turns (see `encode_conversation`).

    Args:
        batch: Columns of the format.
        tokenizer: Tokenizer with a chat template.
        found: Format of the columns.
        max_length: Maximum length of a row in tokens.
        truncate: Whether to cut the end of longer rows.
        day: Date that the template writes; None for today.

    Returns:
        Columns as of `encode_responses`. A conversation may make several rows.
    """

    def encode(row: dict[str, Any], remarks: list[str]) -> list[Encoded]:
        conversation = read_conversation(row, found)
        if conversation.asks_for_others:
            remarks.append("a message that is not the assistant's says that it is to be learned, but is only read")
        return encode_conversation(tokenizer, conversation, day=day, remarks=remarks)

    return _encode_each(batch, encode, max_length if truncate else None)


def refuse_unclear(encoded: Any, *, split: str) -> None:
    """Reject rows that do not say clearly which turns to train on.

    Args:
        encoded: Output of `encode_chats`, as a numbered `datasets.Dataset`.
        split: Name of the split, for messages.

    Raises:
        ValueError: If there are such rows. The message names them and the most frequent reason.
    """
    reasons = column_values(encoded, "unclear")
    if any(reasons):
        ((reason, _),) = Counter(filter(None, reasons)).most_common(1)
        found = describe_rows(encoded, np.flatnonzero([each == reason for each in reasons]), reason, split)
        raise ValueError(
            f"{found}. Write weight: 0 for a turn that is only read and weight: 1 for a turn that is learned, or leave "
            "the key out"
        )


def leave_out_faulty(encoded: Any, *, split: str, skip: bool) -> Any:
    """Reject or skip rows of named columns that can't be rendered.

    Args:
        encoded: Output of `encode_responses` or `encode_chats`, as a numbered `datasets.Dataset`.
        split: Name of the split, for messages.
        skip: Whether to skip such rows and log their number instead of raising an error.

    Returns:
        The other rows.

    Raises:
        ValueError: If there are such rows and `skip` is off, or if no row is left.
    """
    faults = column_values(encoded, "fault")
    first = next(filter(None, faults), "")
    is_faulty = np.asarray([bool(fault) for fault in faults])
    way_out = "Correct them, or leave them out with --skip_empty_rows"
    return leave_out(encoded, is_faulty, f"can't be used ({first})", split=split, skip=skip, way_out=way_out)


def describe_remarks(encoded: Any, *, split: str) -> list[str]:
    """Count the rows whose text differs from the data, by kind of change.

    Args:
        encoded: Output of `encode_responses` or `encode_chats`, as a numbered `datasets.Dataset`.
        split: Name of the split.

    Returns:
        One line per kind.
    """
    numbers = column_values(encoded, ROW_COLUMN)
    # If a conversation became several rows, each of them has its remarks.
    remarks = dict(zip(numbers, column_values(encoded, "remarks"), strict=True))
    counts = Counter(line for lines in remarks.values() for line in lines.splitlines())
    return [count_line(count, len(remarks), split, line) for line, count in counts.most_common()]


def drop_unusable(encoded: Any, target: str, *, max_length: int, split: str) -> tuple[Any, list[str]]:
    """Drop rows that can't be used or have no tokens to train on.

    Args:
        encoded: Output of `encode_responses` or `encode_chats`, as a numbered `datasets.Dataset`.
        target: Name of the trained part, in one word.
        max_length: Maximum length of a row in tokens.
        split: Name of the split, for messages.

    Returns:
        The other rows, and lines with the number of dropped rows by reason and of conversations that became several.

    Raises:
        ValueError: If no row is left.
    """
    faults, counts = column_values(encoded, "fault"), column_values(encoded, "num_targets")
    numbers = column_values(encoded, ROW_COLUMN)
    nothing = f"no {target} token within max_length={max_length}"
    reasons = [fault or ("" if count else nothing) for fault, count in zip(faults, counts, strict=True)]
    total = len(set(numbers))
    # If a conversation became several rows, some of them may be left.
    left = {number for number, reason in zip(numbers, reasons, strict=True) if not reason}
    why = {number: reason for number, reason in zip(numbers, reasons, strict=True) if reason and number not in left}
    by_reason = Counter(why.values()).most_common()
    notes = [f"{count:,} of {total:,} {split} rows dropped: {reason}" for reason, count in by_reason[:_MOST_REASONS]]
    others = sum(count for _, count in by_reason[_MOST_REASONS:])
    if others:
        notes.append(f"{others:,} of {total:,} {split} rows dropped for other reasons")
    if not left:
        raise ValueError(
            f"no row of the {split} split can be learned from: {'; '.join(notes)}. Correct the rows, raise "
            "--max_length, or name what to read with --dataset_format, or --prompt_column and --response_column"
        )
    several = sum(count > 1 for count in Counter(numbers).values())
    if several:
        notes.append(
            f"{several:,} of {total:,} {split} conversations became one row per turn of the assistant, since the chat "
            "template writes a turn differently once others follow"
        )
    return encoded.select(np.flatnonzero([not reason for reason in reasons])), notes


def _encode_each(
    batch: Columns, encode: Callable[[dict[str, Any], list[str]], Sequence[Encoded]], end: int | None
) -> Columns:
    """Encode row by row. A row that can't be encoded becomes a placeholder with the reason."""
    rows = []
    for place, number in enumerate(batch[ROW_COLUMN]):
        remarks: list[str] = []
        about = {"fault": "", "unclear": "", ROW_COLUMN: number}
        try:
            encoded = encode({name: values[place] for name, values in batch.items()}, remarks)
        except (UnusableRowError, UnknownWeightError) as error:
            about["unclear" if isinstance(error, UnknownWeightError) else "fault"] = str(error)
            # Non-empty lists, from which the datasets library infers their type.
            encoded = [([0], [IGNORED])]
        about["remarks"] = "\n".join(dict.fromkeys(remarks))
        for ids, labels in encoded:
            labels = labels[:end]
            # Nothing predicts the first token of a row.
            num_targets = sum(label != IGNORED for label in labels[1:])
            rows.append(
                {"input_ids": ids[:end], "labels": labels, "length": len(ids), "num_targets": num_targets, **about}
            )
    return as_columns(rows)
