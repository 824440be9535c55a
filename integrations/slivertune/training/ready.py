"""A run that is ready to start, and what has to be taken off again when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from slivertune.chunked_loss import ChunkedCrossEntropyHandle
from slivertune.training.callbacks import EvaluateFirst, NonFiniteGuard
from slivertune.training.methods import TrainingMethod
from slivertune.training.methods.tokens import TokenSelection
from slivertune.training.models import ModelSource
from slivertune.training.options.parse import TrainArguments
from slivertune.training.output.display import Display
from slivertune.training.output.ledger_lines import LedgerLines
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.tasks.samples import Probe
from slivertune.training.tasks.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is ready to start."""

    arguments: TrainArguments
    coordinator: LaunchCoordinator
    """The processes of the run; one is alone."""
    layout: str
    """How they share the work."""
    source: ModelSource
    task: Task
    trainer: Trainer
    method: TrainingMethod
    loss: ChunkedCrossEntropyHandle | None
    """None where the loss is computed from whole logits, or by no causal language model."""
    tokens: TokenSelection | None
    """None where all tokens carry gradient."""
    num_parameters: int
    """Weights of the model, adapters included."""
    num_trained: int
    """Those of them that the method trains."""
    display: Display
    guard: NonFiniteGuard
    evaluate_first: EvaluateFirst
    ledger: LedgerLines | None
    probe: Probe | None
    """Asked before and after."""
    facts: dict[str, Any]
    """What every checkpoint's marker carries; `before` and `sample_before` are filled in when they are known."""

    @property
    def model_name(self) -> str:
        """What to call the model."""
        return self.arguments.model.model_name_or_path or "the embedded base model"

    @property
    def dataset_name(self) -> str:
        """What to call the data."""
        return self.arguments.data.dataset or "the Python language reference"

    def close(self) -> None:
        """Take everything off the model and the screen, also after a failure."""
        self.display.close()
        self.guard.close()
        if self.ledger is not None:
            self.ledger.close()
        if self.loss is not None:
            self.loss.remove()
        if self.tokens is not None:
            self.tokens.handle.remove()
        self.method.close()
