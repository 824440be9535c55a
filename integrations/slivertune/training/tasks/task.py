"""What a task hands to the HF Trainer, and how its rows become one padded batch."""

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
    """Pad rows on the right to the longest of the batch.

    Args:
        pad_token_id: Fills `input_ids`; `labels` are filled with -100, everything else (masks, token types) with 0.
        causal: The rows of a causal language model. Those without labels are their own labels, and a first token, which
            nothing predicts, has none: some models' losses count it among the labels and some do not.
        masked: Return an `attention_mask`. Off for packed rows, which are all of one length and need none.
    """

    pad_token_id: int
    causal: bool = False
    masked: bool = True

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Args:
            rows: Each a dict with `input_ids` and maybe `attention_mask`, `token_type_ids`, `labels` (a list as long as
                `input_ids`, or one class).

        Returns:
            int64 tensors of shape (rows, longest); `labels` of shape (rows,) where each is one class.
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
    """Datasets and hooks for a stock `transformers.Trainer`; every field but the last seven is an argument of it."""

    train_dataset: Any
    """`datasets.Dataset` of tokenised rows."""
    eval_dataset: Any
    """`datasets.Dataset` of tokenised rows."""
    data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]
    """Rows to a batch."""
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None
    """Accuracy, where the task has one."""
    preprocess_logits_for_metrics: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    """Shrinks the logits to what the metric needs before they are gathered."""
    compute_loss_func: Callable[..., torch.Tensor] | None = None
    """The loss, where it is not the model's own."""
    model_kind: ModelKind | type[PreTrainedModel]
    """Which head the model must have: AutoModelForCausalLM, ...MaskedLM or ...SequenceClassification; or else the
    class of the model."""
    max_length: int
    """The longest row, in tokens."""
    pad_token_id: int
    """What rows are padded with; `config.pad_token_id` of a classifier must be the same, since a causal one finds the
    last token by it."""
    id2label: dict[int, str] | None = None
    """Class -> the label as it stands in the data."""
    notes: tuple[str, ...] = ()
    """How the rows were read and which were dropped, for the first lines of a run."""
    chat_template: str | None = None
    """The template that was asked for in place of the tokenizer's, which the saved tokenizer should have."""
    chat_template_date: str | None = None
    """The date that the chat template writes, as 2026-01-31; None where it writes none."""
