"""Language modelling: documents, or prompts with the loss on their responses; padded or packed."""

import logging
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import ROW_COLUMN, causal_columns, column_values, leave_out, usable_rows
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import (
    IGNORED,
    Columns,
    as_columns,
    check_lengths,
    common_prefix_length,
    encode_rows,
    leading_special_tokens,
    padding_id,
    resolve_max_length,
    token_ids,
)

logger = logging.getLogger(__name__)

_ROWS_PACKED_TOGETHER = 10_000
"""Packing concatenates this many rows at a time, and drops what is left over of each such stretch."""


def encode_documents(
    batch: Columns, *, tokenizer: PreTrainedTokenizerBase, column: str, max_length: int, whole: bool
) -> Columns:
    """Texts to token ids with an EOS token; long ones are cut into rows of `max_length`.

    Successive rows of one text share one token, so that every token but the text's first is predicted exactly once (the
    first token of a row never is). There may be more rows than texts, or fewer where a text has no tokens.

    Args:
        batch: The texts.
        tokenizer: The tokenizer.
        column: The column of texts.
        max_length: Longest row in tokens.
        whole: Leave texts whole, for packing.
    """
    leading = leading_special_tokens(tokenizer)
    rows = [[*leading, *ids, tokenizer.eos_token_id] for ids in token_ids(tokenizer, batch[column])]
    if not whole:
        rows = [ids[start : start + max_length] for ids in rows for start in range(0, len(ids) - 1, max_length - 1)]
    return {"input_ids": rows}


def encode_responses(
    batch: Columns,
    *,
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...],
    separator: str,
    max_length: int,
    truncate: bool,
) -> Columns:
    """Prompt, separator, response and EOS token in one row, with labels on the response and the EOS token alone.

    The row is tokenised in one piece; the response begins where its tokens part from those of the prompt alone.

    Args:
        batch: The texts.
        tokenizer: The tokenizer.
        columns: The columns of prompts and responses.
        separator: Text between the two.
        max_length: Longest row in tokens.
        truncate: Cut the end of longer rows.

    Returns:
        The batch, row by row; `length` counts tokens before a cut, `num_targets` labels after it.
    """
    leading = leading_special_tokens(tokenizer)
    prompts = [prompt + separator for prompt in batch[columns[0]]]
    texts = [prompt + response for prompt, response in zip(prompts, batch[columns[1]], strict=True)]
    end = max_length if truncate else None
    rows = []
    for ids, prompt_ids in zip(token_ids(tokenizer, texts), token_ids(tokenizer, prompts), strict=True):
        row = [*leading, *ids, tokenizer.eos_token_id]
        num_silent = len(leading) + common_prefix_length((ids, prompt_ids))
        labels = [*[IGNORED] * num_silent, *row[num_silent:]][:end]
        num_targets = len(row[num_silent:end])
        rows.append({"input_ids": row[:end], "labels": labels, "length": len(row), "num_targets": num_targets})
    return {**as_columns(rows), ROW_COLUMN: batch[ROW_COLUMN]}


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
        train_dataset=encode(splits["train"], split="train"),
        eval_dataset=encode(splits["eval"], split="eval"),
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
    packed = encode_rows(
        rows,
        partial(_cut_blocks, max_length=max_length),
        description=f"Packing the {split} split",
        batch_size=_ROWS_PACKED_TOGETHER,
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
    columns: tuple[str, ...],
    max_length: int,
) -> Any:
    rows = usable_rows(rows, columns, args, split=split)
    encode = partial(
        encode_rows, rows, num_workers=args.preprocessing_num_workers, description=f"Tokenising the {split} split"
    )
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_length": max_length}
    if len(columns) == 1:
        encoded = encode(partial(encode_documents, column=columns[0], whole=args.packing, **options))
        if not args.packing and len(encoded) > len(rows):
            logger.info(
                "%d texts of the %s split make %d rows of at most %d tokens", len(rows), split, len(encoded), max_length
            )
    else:
        options |= {"columns": columns, "separator": args.response_separator, "truncate": args.truncate}
        encoded = encode(partial(encode_responses, **options))
        check_lengths(encoded, max_length=max_length, truncate=args.truncate, split=split)
        encoded = leave_out(
            encoded,
            np.asarray(column_values(encoded, "num_targets")) == 0,
            f"have prompts that leave no room for a response in max_length={max_length} tokens",
            split=split,
            skip=args.skip_empty_rows,
            way_out="raise --max_length, or leave them out with --skip_empty_rows",
            none_left="no row is left, raise --max_length",
        )
        encoded = encoded.select_columns(["input_ids", "labels"])
    return pack(encoded, max_length, split=split) if args.packing else encoded


def _cut_blocks(batch: Columns, *, max_length: int) -> Columns:
    """Concatenate the rows of a batch and cut; blocks without a label are dropped, since they have no loss."""
    streams = {name: [token for row in rows for token in row] for name, rows in batch.items()}
    num_blocks = len(streams["input_ids"]) // max_length
    cuts = [slice(index * max_length, (index + 1) * max_length) for index in range(num_blocks)]
    if "labels" in streams:
        cuts = [cut for cut in cuts if any(label != IGNORED for label in streams["labels"][cut][1:])]
    return {name: [stream[cut] for cut in cuts] for name, stream in streams.items()}
