"""What a method of `slivertune train` has to say and do; dense fine-tuning, which does nothing of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from slivertune.training.ledger_lines import Cycle, DenseCycle
from slivertune.training.method_arguments import Method
from slivertune.training.task import Task

FEWEST_UPDATES_A_LINE = 8
"""A cycle shorter than this shares its line with the next ones."""


class TrainingMethod:
    """How a run trains; a subclass overrides what its method does otherwise than the stock Trainer.

    The calls come in this order: `adapt` with the model, `attach` with the Trainer that holds it, then the rest.
    """

    name: Method

    def facts(self) -> dict[str, Any]:
        """What a resumed run must share with the first, beside the method's name; plain JSON."""
        return {}

    def adapt(self, model: PreTrainedModel, task: Task, new_modules: Collection[str]) -> Any:
        """Change what the Trainer gets.

        Args:
            model: As it was loaded, every weight trainable unless it is quantised.
            task: What is learned.
            new_modules: Paths of the modules with weights that the checkpoint lacked.

        Returns:
            The model to train.

        Raises:
            ValueError: If the settings don't fit the model.
        """
        return model

    def attach(self, trainer: Trainer) -> None:
        """Take part in a Trainer that has not trained yet.

        Args:
            trainer: Without an optimizer.

        Raises:
            ValueError: If the settings don't fit the model.
        """

    def cycle(self) -> Cycle:
        """What makes a line of the memory ledger."""
        return DenseCycle()

    def logging_steps(self) -> int:
        """Updates between two lines, where the user says nothing."""
        return FEWEST_UPDATES_A_LINE

    def lines(self) -> list[str]:
        """What to say of the method before training."""
        return []

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """What the user may have overlooked.

        Args:
            model: The model that is trained.
            learning_rate: The library's own, where neither the user nor the embedded default gave another.
        """
        return []

    def settings(self) -> dict[str, Any]:
        """What decides the figures; plain JSON."""
        return {}

    def close(self) -> None:
        """Take everything off the model, also after a failure."""


class DenseMethod(TrainingMethod):
    """All weights every update, as the Trainer does it."""

    name: Method = "dense"

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of weights without masters."""
        if all(parameter.dtype != torch.bfloat16 for parameter in model.parameters()):
            return []
        return ["dense fine-tuning of bf16 weights keeps no fp32 masters; updates below a weight's last bit are lost"]
