"""Datasets and hooks of a task for the HF Trainer, and the padding of its rows to a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, PreTrainedModel

from slivertune.training.tasks.tokenization import IGNORED, as_columns

ModelKind = Literal["causal_lm", "masked_lm", "sequence_classification"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingCollator:
    """Pads rows on the right to the longest of the batch.

    Args:
        pad_token_id: Fill value of `input_ids`. The value for `labels` is -100, for masks and token types 0.
        causal: Whether rows are for a causal language model. Their default labels are their own tokens. A first token,
            which nothing predicts, has no label: the losses of some models count it among the labels, others don't.
        masked: Whether to return an `attention_mask`. Packed rows are all of one length and need none.
    """

    pad_token_id: int
    causal: bool = False
    masked: bool = True

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Args:
            rows: Dicts with `input_ids` and optionally `attention_mask`, `token_type_ids` and `labels` (a list as long
                as `input_ids`, or one class).

        Returns:
            int64 tensors of shape (rows, longest); `labels` of shape (rows,) if each is one class.
        """
        features = as_columns(rows)
        if self.causal:
            features["labels"] = [[IGNORED, *row[1:]] for row in features.get("labels", features["input_ids"])]
        if self.masked and "attention_mask" not in features:
            features["attention_mask"] = [[1] * len(ids) for ids in features["input_ids"]]
        return {name: self._batch(name, values) for name, values in features.items()}

    def _batch(self, name: str, values: list[Any]) -> torch.Tensor:
        if isinstance(values[0], int):
            return torch.tensor(values)
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}.get(name, 0)
        return pad_sequence(
            [torch.tensor(value, dtype=torch.int64) for value in values], batch_first=True, padding_value=fill
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Datasets and hooks for a stock `transformers.Trainer`. All fields but the last seven are its arguments."""

    train_dataset: Any
    """Tokenised training rows, a `datasets.Dataset`."""
    eval_dataset: Any
    """Tokenised evaluation rows, a `datasets.Dataset`."""
    data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]
    """Function that makes a batch of rows."""
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None
    """Function that computes the accuracy, if the task has one."""
    preprocess_logits_for_metrics: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    """Function that reduces the logits to the input of the metric before they are gathered."""
    compute_loss_func: Callable[..., torch.Tensor] | None = None
    """Loss function, if it is not the model's own."""
    model_kind: ModelKind | type[PreTrainedModel]
    """Head that the model must have (AutoModelForCausalLM, ...MaskedLM or ...SequenceClassification), or the class of
    the model."""
    max_length: int
    """Maximum length of a row, in tokens."""
    pad_token_id: int
    """Token id for padding. `config.pad_token_id` of a classifier must be the same, since a causal one finds the last
    token by it."""
    id2label: dict[int, str] | None = None
    """Class number -> label as in the data."""
    notes: tuple[str, ...] = ()
    """Lines about the format of the rows and about dropped rows, for the first lines of a run."""
    chat_template: str | None = None
    """Chat template given in place of the tokenizer's, for the saved tokenizer."""
    chat_template_date: str | None = None
    """Date that the chat template writes, such as 2026-01-31. None if it writes none."""
