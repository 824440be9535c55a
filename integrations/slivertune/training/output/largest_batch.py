"""The largest of the batches that a run has really trained on."""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """The extents of a batch, padding included."""

    num_rows: int
    """Sequences in one forward, on one process."""
    num_tokens: int
    """Tokens in each of them: those of the longest, to which the others are padded."""

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return self.num_rows * self.num_tokens


class LargestBatch:
    """Notes the batch with the most tokens among those that a Trainer trains on, not those it evaluates on."""

    def __init__(self) -> None:
        self.size: BatchSize | None = None
        """None before the first batch."""

    def watch(self, trainer: Trainer) -> None:
        """See every batch before its forward, on this instance of a Trainer alone.

        Args:
            trainer: Has not trained yet.
        """
        training_step = trainer.training_step

        @wraps(training_step)
        def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            self.note(inputs)
            return training_step(model, inputs, *args, **kwargs)

        trainer.training_step = watched  # type: ignore[method-assign]

    def note(self, inputs: dict[str, Any]) -> None:
        """Keep the larger of this batch and those before.

        Args:
            inputs: What the model is called with; one without `input_ids` is passed over.
        """
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        size = BatchSize(num_rows=ids.shape[0], num_tokens=ids.shape[1])
        if self.size is None or size.total > self.size.total:
            self.size = size
