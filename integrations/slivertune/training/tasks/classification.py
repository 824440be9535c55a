"""Sequence classification: one text or a pair, a label, and the accuracy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import (
    LABEL_COLUMN,
    ROW_COLUMN,
    column_values,
    drop_empty_rows,
    first_rows,
    label_column,
    name_rows,
    require_columns,
    sentence_columns,
)
from slivertune.training.data.labels import LabelSet, read_labels
from slivertune.training.options.data import DataArguments
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import (
    Columns,
    RowEncoder,
    check_lengths,
    encode_rows,
    padding_id,
    resolve_max_length,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceEncoder(RowEncoder):
    """Texts or pairs to what the tokenizer makes of them for a classifier.

    Args:
        columns: The column of texts, and maybe that of second texts.
        truncate: Cut longer rows, of a pair the longer text first.
    """

    columns: tuple[str, ...]

    def __call__(self, batch: Columns) -> Columns:
        """Encode a batch, row by row; `length` counts tokens before a cut."""
        texts = [batch[column] for column in self.columns]
        encoded = self.tokenizer(*texts, verbose=False)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        if self.truncate and max(lengths) > self.max_length:
            encoded = self.tokenizer(*texts, truncation=True, max_length=self.max_length)
        return {**encoded, "labels": batch[LABEL_COLUMN], "length": lengths, ROW_COLUMN: batch[ROW_COLUMN]}


def prepare_classification(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: dict[str, Any]
) -> Task:
    """Tokenise for a classifier.

    Args:
        args: Columns and length.
        tokenizer: The tokenizer.
        model_config: Bounds the length.
        splits: Numbered `train` and `eval`.

    Returns:
        Rows with `labels` (a class), judged by `eval_accuracy`.

    Raises:
        ValueError: If labels are no classes or not known from training, or rows don't fit.
    """
    max_length = resolve_max_length(args.max_length, model_config, tokenizer)
    columns = sentence_columns(args, splits["train"])
    labels = read_labels(splits["train"], label_column(args, splits["train"]))
    encoder = SentenceEncoder(tokenizer=tokenizer, columns=columns, max_length=max_length, truncate=args.truncate)
    encoded = encode_labelled(splits, columns, labels, {"train": encoder, "eval": encoder}, args=args)
    return Task(
        train_dataset=encoded["train"],
        eval_dataset=encoded["eval"],
        data_collator=PaddingCollator(pad_token_id=padding_id(tokenizer)),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=predicted_classes,
        compute_loss_func=cross_entropy,
        model_kind="sequence_classification",
        max_length=max_length,
        pad_token_id=padding_id(tokenizer),
        id2label=labels.id2label,
    )


def encode_labelled(
    splits: dict[str, Any],
    columns: tuple[str, ...],
    labels: LabelSet,
    encoders: Mapping[str, RowEncoder],
    *,
    args: DataArguments,
    with_indices: bool = False,
) -> dict[str, Any]:
    """Encode the rows of both splits that say something, and refuse what does not fit.

    Args:
        splits: Numbered `train` and `eval`.
        columns: The text columns.
        labels: The labels of the training split.
        encoders: By split.
        args: Lengths, limits, and whether empty rows are an error.
        with_indices: Whether an encoder takes the rows' positions too.

    Returns:
        The encoded rows, by split.

    Raises:
        ValueError: If a column is absent, a row is empty or too long, or a label is unknown.
    """
    encoded = {}
    for split, limit in (("train", args.max_train_samples), ("eval", args.max_eval_samples)):
        rows = _labelled(first_rows(splits[split], limit), columns, labels, args=args, split=split)
        rows = encode_rows(
            rows,
            encoders[split],
            num_workers=args.preprocessing_num_workers,
            description=f"Tokenising the {split} split",
            with_indices=with_indices,
        )
        check_lengths(rows, max_length=encoders[split].max_length, truncate=args.truncate, split=split)
        encoded[split] = _without_notes(rows, split)
    return encoded


def _labelled(rows: Any, columns: tuple[str, ...], labels: LabelSet, *, args: DataArguments, split: str) -> Any:
    """The text columns of the rows that say something, their number, and their class in `LABEL_COLUMN`."""
    require_columns(rows, (*columns, labels.column), split)
    rows = drop_empty_rows(rows, (*columns, labels.column), split=split, skip=args.skip_empty_rows)
    classes = np.asarray(labels.encode(rows, split=split), dtype=np.int64)
    rows = rows.select_columns(list(dict.fromkeys((*columns, ROW_COLUMN))))
    return rows.add_column(LABEL_COLUMN, classes)


def _without_notes(rows: Any, split: str) -> Any:
    """Drop the columns made for checks, after the last of them."""
    if "num_masks" in rows.column_names:
        odd = np.flatnonzero(np.asarray(column_values(rows, "num_masks")) != 1).tolist()
        if odd:
            numbers = column_values(rows.select(odd), ROW_COLUMN)
            raise ValueError(
                f"{len(odd)} of {len(rows)} rows of the {split} split hold another mask token beside the template's "
                f"({name_rows(numbers)}, counted from 0); take it out of the text"
            )
    notes = {"length", "num_masks", ROW_COLUMN}
    return rows.remove_columns(sorted(notes.intersection(rows.column_names)))


def cross_entropy(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """The mean over rows of the right class's negative log-probability; a `compute_loss_func` of the Trainer.

    The classifiers of transformers (5.23) take a mean over each batch for themselves, while the Trainer counts on the
    mean over all accumulated batches and adds up what it gets: with 4 accumulated batches, 4 times the gradient.

    Args:
        outputs: Of a classifier, with `logits` of shape (rows, classes).
        labels: int64 classes, shape (rows,).
        num_items_in_batch: Rows over all accumulated batches, from the Trainer; those of this batch if None.

    Returns:
        A scalar.
    """
    total = F.cross_entropy(outputs["logits"].float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def predicted_classes(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The likeliest class of each row; a `preprocess_logits_for_metrics` of the Trainer.

    Args:
        logits: Shape (rows, classes), or a tuple that begins with it, from models that return more.
        labels: Not read.

    Returns:
        int64 classes, shape (rows,).
    """
    scores: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    return scores.argmax(dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of rows whose class was predicted; a `compute_metrics` of the Trainer.

    Args:
        prediction: Predictions and labels are classes, shape (rows,).

    Returns:
        `accuracy`, in [0, 1].
    """
    return {"accuracy": float(np.mean(np.asarray(prediction.predictions) == np.asarray(prediction.label_ids)))}
