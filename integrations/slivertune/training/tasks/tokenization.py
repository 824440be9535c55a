"""Tokenisation shared by all tasks: lengths, positions of the model, special tokens, caching."""

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.core.positions import usable_positions
from slivertune.training.data.columns import NUM_NAMED_ROWS, ROW_COLUMN, column_values, name_rows

logger = logging.getLogger(__name__)

Columns: TypeAlias = dict[str, list[Any]]

DEFAULT_MAX_LENGTH = 1024
"""Default maximum length of a row in tokens, if the model and the tokenizer allow it."""

IGNORED = -100
"""Label of a position without a loss (the convention of torch's cross entropy and of transformers)."""


def source_digest() -> str:
    """Return a digest of the source of `slivertune train`, to be one of an encoder's arguments.

    The datasets library knows an imported function or class only by its name. Without the digest, it would read results
    cached by older code after a change of the code.
    """
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def as_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Convert rows to a batch of columns. All rows have the keys of the first."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def resolve_max_length(requested: int | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Choose the maximum length of a row in tokens, or check the requested one.

    Args:
        requested: `--max_length`; None for the least of 1,024, the model's positions and the tokenizer's limit.
        config: Configuration of the model.
        tokenizer: Tokenizer, whose `model_max_length` limits only the default.

    Returns:
        Maximum length of a row, in tokens.

    Raises:
        ValueError: If the request is more than the model has positions, or less than two tokens.
    """
    limit = usable_positions(config)
    if requested is None:
        length = int(min(DEFAULT_MAX_LENGTH, limit[0] if limit else DEFAULT_MAX_LENGTH, tokenizer.model_max_length))
        logger.info("rows are at most %d tokens long (--max_length)", length)
        return length
    if requested < 2:
        raise ValueError(f"max_length={requested} must be at least 2 tokens. Leave it out for the default")
    if limit is not None and requested > limit[0]:
        raise ValueError(
            f"max_length={requested} is more than the {limit[0]} positions of the model ({limit[1]}). "
            f"Lower --max_length to {limit[0]}, or use a model with more positions"
        )
    return requested


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts without special tokens and without a length limit."""
    if not texts:
        return []
    # verbose=False: check_lengths handles rows longer than the model takes.
    return list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])


def split_token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, borders: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tokenise a text once, without special tokens, and count the tokens before each border in it.

    A token that spans a border belongs to the part after it. Tokenizers written in Python have no offsets. They
    tokenise the parts between borders as well and, if that gives other tokens, the text before each border.

    Args:
        tokenizer: The tokenizer.
        text: The text.
        borders: Positions in the text, in characters.

    Returns:
        The token ids, and for each border the number of tokens before it.
    """
    if not tokenizer.is_fast:
        parts = [text[begin:end] for begin, end in pairwise((0, *borders, len(text)))]
        ids, *ids_of_parts = token_ids(tokenizer, [text, *parts])
        if list(chain.from_iterable(ids_of_parts)) == ids:
            return ids, list(accumulate(map(len, ids_of_parts[:-1])))
        beginnings = token_ids(tokenizer, [text[:border] for border in borders])
        return ids, [common_prefix_length((ids, beginning)) for beginning in beginnings]
    backend: Any = tokenizer.backend_tokenizer
    # The post-processor adds unwanted special tokens, and may leave white space out of the offsets.
    own, backend.post_processor = backend.post_processor, None
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    finally:
        backend.post_processor = own
    ids = list(encoded["input_ids"])
    strips = {token for token, added in added_tokens(tokenizer, len(tokenizer)).items() if added.rstrip}
    # A token of the template may include the white space behind it, and still belongs to the template.
    ends = [
        begin + len(text[begin:end].rstrip()) if token in strips else end
        for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids, [bisect_right(ends, border) for border in borders]


@lru_cache(maxsize=4)
def added_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, Any]:
    """Return the tokens that a tokenizer never divides, by their ids. Some tokenizers have thousands.

    Args:
        tokenizer: The tokenizer.
        size: Length of the tokenizer, for the cache: it changes when tokens are added.
    """
    return dict(tokenizer.added_tokens_decoder)


def leading_special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text, such as a BOS token. Often there are none."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    is_special: list[int] = encoded["special_tokens_mask"]
    return list(encoded["input_ids"][: is_special.index(0)]) if 0 in is_special else []


def common_prefix_length(sequences: Sequence[Sequence[Any]]) -> int:
    """Return the length of the longest prefix that all sequences share."""
    return len(list(takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))))


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id to pad with: the pad token's, else the EOS token's (padding is masked and carries no loss).

    Raises:
        ValueError: If the tokenizer has neither.
    """
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            return value
    raise ValueError(f"{type(tokenizer).__name__} has neither a pad nor an EOS token. Set tokenizer.pad_token")


def check_lengths(rows: Any, *, max_length: int, truncate: bool, split: str) -> None:
    """Reject rows that are longer than allowed, or log how many were cut.

    Args:
        rows: A tokenised, numbered `datasets.Dataset` with a `length` column: tokens before any cut.
        max_length: Maximum length of a row, in tokens.
        truncate: Whether the rows were cut.
        split: Name of the split, for messages.

    Raises:
        ValueError: If rows are too long and were not cut.
    """
    lengths = np.asarray(column_values(rows, "length"))
    is_long = lengths > max_length
    if not is_long.any():
        return
    # The candidates of one example are several rows with one number and one length.
    length_of_row = dict(sorted(zip(column_values(rows, ROW_COLUMN), lengths.tolist(), strict=True)))
    long = [length for length in length_of_row.values() if length > max_length]
    found = (
        f"{len(long)} of {len(length_of_row)} rows of the {split} split are longer than max_length={max_length} tokens"
    )
    if truncate:
        logger.warning("%s, the longest has %d; they are cut", found, max(long))
        return
    some = ", ".join(str(length) for length in long[:NUM_NAMED_ROWS])
    raise ValueError(
        f"{found} ({name_rows(rows, np.flatnonzero(is_long))}, with {some} tokens, and {max(long)} at most). "
        "Raise --max_length, or cut them with --truncate"
    )


def encode_rows(
    rows: Any,
    encode: Callable[..., Columns],
    *,
    description: str,
    num_workers: int | None = None,
    batch_size: int = 1000,
    with_indices: bool = False,
) -> Any:
    """Apply an encoder to all rows of a `datasets.Dataset`, in batches. Its result replaces all columns.

    Args:
        rows: The dataset.
        encode: Function from a batch of columns to another. It must be a function of a module, or a `functools.partial`
            of one, since the datasets library caches the result by its name and arguments.
        description: Text beside the progress bar.
        num_workers: Number of processes; None for this process.
        batch_size: Rows per batch.
        with_indices: Whether to pass the rows' positions as a second argument.

    Returns:
        The encoded dataset. A repeated call with the same data and encoder is read from the cache.
    """
    return rows.map(
        _encode,
        batched=True,
        batch_size=batch_size,
        with_indices=with_indices,
        remove_columns=rows.column_names,
        num_proc=min(num_workers, len(rows)) if num_workers is not None and num_workers > 1 else None,
        fn_kwargs={"encode": encode, "source": source_digest()},
        desc=description,
    )


def _encode(batch: Columns, *places: list[int], encode: Callable[..., Columns], source: str) -> Columns:
    return encode(batch, *places)
