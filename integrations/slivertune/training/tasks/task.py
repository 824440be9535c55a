"""What a task hands to the HF Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import EvalPrediction

from slivertune.training.tasks.collator import PaddingCollator

ModelKind = Literal["causal_lm", "masked_lm", "sequence_classification"]

Metrics = Callable[[EvalPrediction], dict[str, float]]
LogitsFilter = Callable[[Any, torch.Tensor], torch.Tensor]
LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Datasets and hooks for a stock `transformers.Trainer`; every field but the last six is an argument of it."""

    train_dataset: Any
    """`datasets.Dataset` of tokenised rows."""
    eval_dataset: Any
    """`datasets.Dataset` of tokenised rows."""
    data_collator: PaddingCollator
    """Rows to a batch."""
    compute_metrics: Metrics | None = None
    """Accuracy, where the task has one."""
    preprocess_logits_for_metrics: LogitsFilter | None = None
    """Shrinks the logits to what the metric needs before they are gathered."""
    compute_loss_func: LossFunction | None = None
    """The loss, where it is not the model's own."""
    metric_name: Literal["eval_loss", "eval_accuracy"]
    """What to judge a model by; a loss is better when lower, an accuracy when higher."""
    model_kind: ModelKind
    """Which head the model must have: AutoModelForCausalLM, ...MaskedLM or ...SequenceClassification."""
    max_length: int
    """The longest row, in tokens."""
    pad_token_id: int
    """What rows are padded with; `config.pad_token_id` of a classifier must be the same, since a causal one finds the
    last token by it."""
    num_labels: int | None = None
    """Number of classes, for the model's head or the label words."""
    id2label: dict[int, str] | None = None
    """Class -> the label as it stands in the data."""

    @property
    def label2id(self) -> dict[str, int] | None:
        """The label as it stands in the data -> class."""
        return None if self.id2label is None else {name: index for index, name in self.id2label.items()}
