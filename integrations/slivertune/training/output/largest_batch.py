"""Largest of the batches that a run has trained on."""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """Size of a batch, padding included."""

    num_rows: int
    """Sequences per forward and process."""
    num_tokens: int
    """Tokens per sequence: those of the longest one, to which the others are padded."""

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return self.num_rows * self.num_tokens


class LargestBatch:
    """Records the batch with the most tokens that a Trainer trains on. Evaluation batches are ignored."""

    def __init__(self) -> None:
        self.size: BatchSize | None = None
        """Size of the largest batch. None before the first batch."""

    def watch(self, trainer: Trainer) -> None:
        """Record every training batch of this Trainer instance before its forward.

        Args:
            trainer: Trainer that has not trained yet.
        """
        training_step = trainer.training_step

        @wraps(training_step)
        def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            self.note(inputs)
            return training_step(model, inputs, *args, **kwargs)

        trainer.training_step = watched  # type: ignore[method-assign]

    def note(self, inputs: dict[str, Any]) -> None:
        """Keep the larger of this batch and the largest one so far.

        Args:
            inputs: Arguments of the model's forward. A batch without `input_ids` is ignored.
        """
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        size = BatchSize(num_rows=ids.shape[0], num_tokens=ids.shape[1])
        if self.size is None or size.total > self.size.total:
            self.size = size
