"""Language modelling on texts, on prompts and responses, or on chats, with padded or packed rows."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import (
    column_values,
    count_line,
    first_rows,
    iterate_values,
    leave_out,
    require_text_of_evaluation,
    usable_rows,
)
from slivertune.training.data.formats import find_format, with_nulls_of
from slivertune.training.data.mixing import mix_rows
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.chat import describe_turn_begin, describe_turn_end, set_chat_template
from slivertune.training.tasks.labelled_rows import (
    describe_remarks,
    drop_unusable,
    encode_chats,
    encode_responses,
    leave_out_faulty,
    refuse_unclear,
)
from slivertune.training.tasks.reading import Reading, check_settings_are_read, choose_reading, template_day
from slivertune.training.tasks.special_ends import special_ends
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import (
    IGNORED,
    Columns,
    check_lengths,
    encode_rows,
    leading_special_tokens,
    padding_id,
    resolve_max_length,
    token_ids,
)

logger = logging.getLogger(__name__)

_ROWS_PACKED_TOGETHER = 10_000
"""Number of rows that packing concatenates at a time. The remainder of each such stretch is dropped."""


def encode_documents(
    batch: Columns, *, tokenizer: PreTrainedTokenizerBase, column: str, max_length: int, whole: bool
) -> Columns:
    """Tokenise texts with an EOS token each, and cut long ones into rows of `max_length`.

    Special tokens at the ends of a text that the row gets anyway are kept once.

    Successive rows of one text share one token, so that every token but the text's first is predicted exactly once (the
    first token of a row never is). There may be more rows than texts, or fewer if a text has no tokens.

    Args:
        batch: The texts.
        tokenizer: The tokenizer.
        column: Name of the text column.
        max_length: Maximum length of a row in tokens.
        whole: Whether to leave texts whole, for packing.
    """
    leading, ends = leading_special_tokens(tokenizer), special_ends(tokenizer)
    texts = [ends.text_once(text) for text in batch[column]]
    rows = [[*leading, *ids, tokenizer.eos_token_id] for ids in token_ids(tokenizer, texts)]
    if not whole:
        rows = [ids[start : start + max_length] for ids in rows for start in range(0, len(ids) - 1, max_length - 1)]
    return {"input_ids": rows}


def prepare_causal(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: Any
) -> Task:
    """Tokenise one dataset for language modelling.

    Args:
        args: Settings for columns, format, length and packing.
        tokenizer: Tokenizer with an EOS token, which ends every text and response. It gets the chat template in `args`.
        model_config: Configuration of a decoder.
        splits: Numbered `train` and `eval` splits.

    Returns:
        Rows of `input_ids` (and `labels`, if not all tokens are trained on), evaluated by `eval_loss`.

    Raises:
        ValueError: If the model is an encoder-decoder, the tokenizer has no EOS token, the format of the columns is
            unknown, a chat has no template, or rows don't fit.
    """
    return prepare_mixture(args, tokenizer, model_config, {"": splits}, seed=0)


def prepare_mixture(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    sources: Mapping[str, Any],
    *,
    seed: int,
) -> Task:
    """Tokenise several datasets for language modelling, each in its own format, and mix them.

    Args:
        args: Settings for columns, format, length and packing, and the weights of the datasets.
        tokenizer: Tokenizer, as for `prepare_causal`.
        model_config: Configuration of a decoder.
        sources: Numbered `train` and `eval` splits, or one of them, by dataset name.
        seed: Seed for the order in which rows of weighted datasets are drawn.

    Returns:
        A task with the mixed training rows of all datasets, and their evaluation rows one after another.

    Raises:
        ValueError: As `prepare_causal`.
    """
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"task=causal_lm needs a decoder, and {model_config.model_type} is an encoder-decoder. Choose another model"
        )
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(
            f"{type(tokenizer).__name__} has no EOS token to end a text with. Set tokenizer.eos_token, or eos_token in "
            f"{Path(tokenizer.name_or_path) / 'tokenizer_config.json'}"
        )
    max_length = resolve_max_length(args.max_length, model_config, tokenizer)
    if args.chat_template is not None:
        set_chat_template(tokenizer, args.chat_template)
    readings = {}
    for name, splits in sources.items():
        with _about(name):
            readings[name] = choose_reading(args, tokenizer, find_format(args, next(iter(splits.values()))))
    check_settings_are_read(args, readings.values())
    day = template_day(args.chat_template_date, tokenizer, readings.values())
    parts, notes = _encode_sources(args, tokenizer, sources, readings, max_length, day)
    rows_of = {
        "train": mix_rows(parts["train"], args.dataset_weights, seed=seed),
        "eval": mix_rows(parts["eval"], None, seed=seed),
    }
    if args.packing:
        rows_of = {split: pack(rows, max_length, split=split) for split, rows in rows_of.items()}
    return Task(
        train_dataset=rows_of["train"],
        eval_dataset=rows_of["eval"],
        data_collator=PaddingCollator(pad_token_id=padding_id(tokenizer), causal=True, masked=not args.packing),
        model_kind="causal_lm",
        max_length=max_length,
        pad_token_id=padding_id(tokenizer),
        notes=tuple(notes),
        chat_template=args.chat_template and tokenizer.chat_template,
        chat_template_date=None if day is None else day.isoformat(),
    )


def _encode_sources(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    sources: Mapping[str, Any],
    readings: Mapping[str, Reading],
    max_length: int,
    day: date | None,
) -> tuple[dict[str, list[Any]], list[str]]:
    """Tokenise every dataset. Return the rows of each split, dataset by dataset, and notes about them."""
    parts: dict[str, list[Any]] = {"train": [], "eval": []}
    notes: list[str] = []
    for place, (name, splits) in enumerate(sources.items()):
        weight = f" (weight {args.dataset_weights[place]:g})" if args.dataset_weights and "train" in splits else ""
        about = f"{name}{weight}: " if len(sources) > 1 else ""
        notes.append(about + readings[name].describe(next(iter(splits.values())), str(tokenizer.chat_template)))
        for split, rows in splits.items():
            with _about(name):
                encoded, said = _encode_split(
                    rows,
                    split=split,
                    args=args,
                    tokenizer=tokenizer,
                    reading=readings[name],
                    max_length=max_length,
                    day=day,
                )
            parts[split].append(encoded)
            notes += [about + line for line in said]
    written = [
        labels
        for name, part in zip(sources, parts["train"], strict=False)
        if readings[name].uses_template and (labels := _first_whole(part, max_length)) is not None
    ]
    notes += [*describe_turn_begin(tokenizer), *describe_turn_end(tokenizer, written[0])] if written else []
    if day is not None:
        notes.append(f"the chat template writes the date, which is {day} in this run (--chat_template_date)")
    return parts, notes


def _first_whole(rows: Any, max_length: int) -> list[int] | None:
    """Return the labels of the first row that was not cut, or None."""
    every = (labels for batch in rows.iter(batch_size=100) for labels in batch["labels"])
    return next((labels for labels in every if len(labels) < max_length), None)


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Prefix an error with the name of its dataset, if there are several datasets."""
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"{name}: {error}") from error


def pack(rows: Any, max_length: int, *, split: str) -> Any:
    """Concatenate rows and cut them into blocks of exactly `max_length` tokens.

    Attention and positions continue across the texts of a block, which EOS tokens separate. Nothing is reset, so any
    model and attention kernel takes the batch, and a text sees the end of the previous one. The remainder of every
    10,000 rows, less than one block, is dropped.

    Args:
        rows: A `datasets.Dataset` with `input_ids` and optionally `labels`, whose -100 stay.
        max_length: Tokens per block.
        split: Name of the split, for messages.

    Returns:
        The blocks.

    Raises:
        ValueError: If the rows make no block with a loss.
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
            f"the {split} split has {num_tokens} tokens, too few for a packed block of max_length={max_length} with a "
            "loss. Lower --max_length or leave out --packing"
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
    reading: Reading,
    max_length: int,
    day: date | None,
) -> tuple[Any, list[str]]:
    """Tokenise a split. Return its rows, and notes about them."""
    found = with_nulls_of(reading.format, rows)
    is_lenient = found.is_chat or found.is_instruction
    choose = first_rows if is_lenient else usable_rows
    rows = choose(rows, found.columns, args, split=split)
    if split == "eval" and not found.is_chat:
        require_text_of_evaluation(rows, (*found.columns, *(name for name in found.optional if name != "tools")))
    encode = partial(
        encode_rows, rows, num_workers=args.preprocessing_num_workers, description=f"Tokenising the {split} split"
    )
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_length": max_length}
    if found.name == "text":
        encoded = encode(partial(encode_documents, column=found.columns[0], whole=args.packing, **options))
        if not args.packing and len(encoded) > len(rows):
            logger.info(
                "%d texts of the %s split make %d rows of at most %d tokens", len(rows), split, len(encoded), max_length
            )
        ends = special_ends(tokenizer)
        count = sum(ends.text_once(text) != text for text in iterate_values(rows, found.columns[0]))
        return encoded, [count_line(count, len(rows), split, ends.remark)] if count else []
    options |= {"found": found, "truncate": args.truncate}
    if reading.uses_template:
        encoded = encode(partial(encode_chats, day=day, **options))
        refuse_unclear(encoded, split=split)
    else:
        encoded = encode(partial(encode_responses, separator=args.response_separator, **options))
    check_lengths(encoded, max_length=max_length, truncate=args.truncate, split=split)
    notes: list[str] = []
    if is_lenient:
        encoded, notes = drop_unusable(encoded, found.target, max_length=max_length, split=split)
    else:
        encoded = leave_out_faulty(encoded, split=split, skip=args.skip_empty_rows)
        encoded = leave_out(
            encoded,
            np.asarray(column_values(encoded, "num_targets")) == 0,
            f"have prompts that leave no room for a response in max_length={max_length} tokens",
            split=split,
            skip=args.skip_empty_rows,
            way_out="Raise --max_length, or leave them out with --skip_empty_rows",
            none_left="No row is left. Raise --max_length",
        )
    notes += describe_remarks(encoded, split=split)
    return encoded.select_columns(["input_ids", "labels"]), notes


def _cut_blocks(batch: Columns, *, max_length: int) -> Columns:
    """Concatenate the rows of a batch and cut them into blocks. Blocks without labels have no loss and are dropped."""
    streams = {name: [token for row in rows for token in row] for name, rows in batch.items()}
    num_blocks = len(streams["input_ids"]) // max_length
    cuts = [slice(index * max_length, (index + 1) * max_length) for index in range(num_blocks)]
    if "labels" in streams:
        cuts = [cut for cut in cuts if any(label != IGNORED for label in streams["labels"][cut][1:])]
    return {name: [stream[cut] for cut in cuts] for name, stream in streams.items()}
