"""Language modelling: documents, or prompts with the loss on their responses; padded or packed."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import (
    ROW_COLUMN,
    CausalColumns,
    causal_columns,
    column_values,
    drop_empty_rows,
    first_rows,
    name_rows,
    require_columns,
)
from slivertune.training.options.data import DataArguments
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import (
    IGNORED,
    Columns,
    RowEncoder,
    as_columns,
    check_lengths,
    common_prefix_length,
    encode_rows,
    leading_special_tokens,
    padding_id,
    resolve_max_length,
    source_digest,
    token_ids,
)

logger = logging.getLogger(__name__)

_ROWS_PACKED_TOGETHER = 10_000
"""Packing concatenates this many rows at a time, and drops what is left over of each such stretch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentEncoder(RowEncoder):
    """Texts to token ids with an EOS token; long ones are cut into rows of `max_length`.

    Successive rows of one text share one token, so that every token but the text's first is predicted exactly once (the
    first token of a row never is).

    Args:
        column: The column of texts.
        leading: Special tokens before a text.
        whole: Leave texts whole, for packing.
    """

    column: str
    leading: tuple[int, ...]
    whole: bool

    def __call__(self, batch: Columns) -> Columns:
        """Encode a batch; it may get more rows, or fewer where a text has no tokens."""
        rows = []
        for ids in token_ids(self.tokenizer, batch[self.column]):
            rows.extend(self._blocks([*self.leading, *ids, _eos(self.tokenizer)]))
        return {"input_ids": rows}

    def _blocks(self, ids: list[int]) -> list[list[int]]:
        if self.whole:
            return [ids]
        return [ids[start : start + self.max_length] for start in range(0, len(ids) - 1, self.max_length - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseEncoder(RowEncoder):
    """Prompt, separator, response and EOS token in one row, with labels on the response and the EOS token alone.

    The row is tokenised in one piece; the response begins where its tokens part from those of the prompt alone.

    Args:
        columns: The columns of prompts and responses.
        separator: Text between the two.
        leading: Special tokens before a text.
        truncate: Cut the end of longer rows.
    """

    columns: CausalColumns
    separator: str
    leading: tuple[int, ...]

    def __call__(self, batch: Columns) -> Columns:
        """Encode a batch, row by row; `length` counts tokens before a cut, `num_targets` labels after it."""
        prompts = [prompt + self.separator for prompt in batch[str(self.columns.prompt)]]
        responses = batch[str(self.columns.response)]
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        pairs = zip(token_ids(self.tokenizer, texts), token_ids(self.tokenizer, prompts), strict=True)
        encoded = as_columns([self._row(ids, prompt_ids) for ids, prompt_ids in pairs])
        return {**encoded, ROW_COLUMN: batch[ROW_COLUMN]}

    def _row(self, ids: list[int], prompt_ids: list[int]) -> dict[str, Any]:
        num_silent = len(self.leading) + common_prefix_length((ids, prompt_ids))
        row = [*self.leading, *ids, _eos(self.tokenizer)]
        labels = [*[IGNORED] * num_silent, *row[num_silent:]]
        end = self.max_length if self.truncate else None
        num_targets = len(row[num_silent:end])
        return {"input_ids": row[:end], "labels": labels[:end], "length": len(row), "num_targets": num_targets}


def prepare_causal(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: dict[str, Any]
) -> Task:
    """Tokenise for language modelling.

    Args:
        args: Columns, length, packing.
        tokenizer: Must have an EOS token, which ends every text and response.
        model_config: Must be a decoder's.
        splits: Numbered `train` and `eval`.

    Returns:
        Rows of `input_ids` (and `labels` for responses), judged by `eval_loss`.

    Raises:
        ValueError: If the model is an encoder-decoder, the tokenizer has no EOS token, or rows don't fit.
    """
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"task=causal_lm needs a decoder, and {model_config.model_type} is an encoder-decoder; choose another model"
        )
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(f"{type(tokenizer).__name__} has no EOS token to end a text with; set tokenizer.eos_token")
    max_length = resolve_max_length(args.max_length, model_config, tokenizer)
    columns = causal_columns(args, splits["train"])
    encode = partial(_encode_split, args=args, tokenizer=tokenizer, columns=columns, max_length=max_length)
    return Task(
        train_dataset=encode(first_rows(splits["train"], args.max_train_samples), split="train"),
        eval_dataset=encode(first_rows(splits["eval"], args.max_eval_samples), split="eval"),
        data_collator=PaddingCollator(pad_token_id=padding_id(tokenizer), causal=True, masked=not args.packing),
        model_kind="causal_lm",
        max_length=max_length,
        pad_token_id=padding_id(tokenizer),
    )


def pack(rows: Any, max_length: int, *, split: str) -> Any:
    """Concatenate rows and cut blocks of exactly `max_length` tokens.

    Attention and positions run on across the texts of a block, which EOS tokens separate: nothing is reset, so that
    any model and attention kernel takes the batch, and a text sees the end of the one before it. What is left over at
    the end of every 10,000 rows, less than one block, is dropped.

    Args:
        rows: A `datasets.Dataset` with `input_ids` and maybe `labels`, whose -100 stay.
        max_length: Tokens in a block.
        split: Name of the split, for messages.

    Returns:
        The blocks.

    Raises:
        ValueError: If there are fewer tokens than one block has.
    """
    num_tokens = sum(len(ids) for batch in rows.iter(batch_size=1000) for ids in batch["input_ids"])
    packed = rows.map(
        partial(_cut_blocks, max_length=max_length, source=source_digest()),
        batched=True,
        batch_size=_ROWS_PACKED_TOGETHER,
        remove_columns=rows.column_names,
        desc=f"Packing the {split} split",
    )
    if len(packed) == 0:
        raise ValueError(
            f"the {split} split has {num_tokens} tokens, which make no packed block of max_length={max_length} with a "
            "loss; lower --max_length or leave out --packing"
        )
    logger.info(
        "packed the %s split into %d blocks of %d tokens; %d of %d tokens were left over",
        split, len(packed), max_length, num_tokens - len(packed) * max_length, num_tokens,
    )  # fmt: skip
    return packed


def _encode_split(
    rows: Any,
    *,
    split: str,
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    columns: CausalColumns,
    max_length: int,
) -> Any:
    require_columns(rows, columns.names, split)
    rows = drop_empty_rows(rows, columns.names, split=split, skip=args.skip_empty_rows)
    leading = tuple(leading_special_tokens(tokenizer))
    encode = partial(
        encode_rows, num_workers=args.preprocessing_num_workers, description=f"Tokenising the {split} split"
    )
    if columns.text is not None:
        documents = DocumentEncoder(
            tokenizer=tokenizer, column=columns.text, leading=leading, max_length=max_length, whole=args.packing
        )
        encoded = encode(rows, documents)
        if not args.packing and len(encoded) > len(rows):
            logger.info(
                "%d texts of the %s split make %d rows of at most %d tokens", len(rows), split, len(encoded), max_length
            )
    else:
        encoder = ResponseEncoder(
            tokenizer=tokenizer,
            columns=columns,
            separator=args.response_separator,
            leading=leading,
            max_length=max_length,
            truncate=args.truncate,
        )
        encoded = _check_responses(encode(rows, encoder), args, max_length, split)
    return pack(encoded, max_length, split=split) if args.packing else encoded


def _check_responses(encoded: Any, args: DataArguments, max_length: int, split: str) -> Any:
    check_lengths(encoded, max_length=max_length, truncate=args.truncate, split=split)
    num_targets = np.asarray(column_values(encoded, "num_targets"))
    (silent,) = np.nonzero(num_targets == 0)
    if len(silent):
        numbers = column_values(encoded.select(silent), ROW_COLUMN)
        found = (
            f"{len(silent)} of {len(encoded)} rows of the {split} split have prompts that leave no room for a response "
            f"in max_length={max_length} tokens ({name_rows(numbers)}, counted from 0)"
        )
        if not args.skip_empty_rows:
            raise ValueError(f"{found}; raise --max_length, or leave them out with --skip_empty_rows")
        if len(silent) == len(encoded):
            raise ValueError(f"{found}; no row is left, raise --max_length")
        logger.warning("%s; they are left out", found)
        encoded = encoded.select(np.flatnonzero(num_targets))
    return encoded.select_columns(["input_ids", "labels"])


def _cut_blocks(batch: Columns, *, max_length: int, source: str) -> Columns:
    """Concatenate the rows of a batch and cut; blocks without a label are dropped, since they have no loss."""
    streams = {name: [token for row in rows for token in row] for name, rows in batch.items()}
    num_blocks = len(streams["input_ids"]) // max_length
    cuts = [slice(index * max_length, (index + 1) * max_length) for index in range(num_blocks)]
    if "labels" in streams:
        cuts = [cut for cut in cuts if any(label != IGNORED for label in streams["labels"][cut][1:])]
    return {name: [stream[cut] for cut in cuts] for name, stream in streams.items()}


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.eos_token_id)
