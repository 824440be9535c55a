"""What a method of `slivertune train` has to say and do; dense fine-tuning, which does nothing of its own."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from slivertune.core import atomic
from slivertune.parallel.layout import layout_of
from slivertune.training.options.checks import enum_value
from slivertune.training.options.method import Method
from slivertune.training.output.ledger_lines import Cycle, DenseCycle
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.ranks.layouts import save_whole_model
from slivertune.training.tasks.task import Task

FEWEST_UPDATES_A_LINE = 8
"""A cycle shorter than this shares its line with the next ones."""


MODEL_FOLDER = "model"
"""Where the trained model lies in a run's folder, without optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a run leaves behind, beside its checkpoints."""

    model: Path | None
    """Folder of the trained model, or None where deltas are all there is."""
    deltas: Path | None = None
    """Folder of SFT's deltas."""
    merge_command: tuple[str, ...] | None = None
    """Makes a model of the deltas, where there is none."""


class TrainingMethod:
    """How a run trains; a subclass overrides what its method does otherwise than the stock Trainer.

    The calls come in this order: `adapt` with the model, `admit` around the making of the Trainer, `attach` with it,
    then the rest.
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

    def admit(self, model: Any) -> AbstractContextManager[None]:
        """What the Trainer must be made in, to take this model.

        Args:
            model: What `adapt` returned.
        """
        return nullcontext()

    def attach(self, trainer: Trainer) -> None:
        """Take part in a Trainer that has not trained yet.

        Args:
            trainer: Without an optimizer.

        Raises:
            ValueError: If the settings don't fit the model.
        """

    def num_trained(self, num_trainable: int) -> int:
        """How many weights are trained.

        Args:
            num_trainable: Weights that required gradients before `attach`.
        """
        return num_trainable

    def optimizer_name(self, training: TrainingArguments) -> str:
        """What to call the optimizer.

        Args:
            training: The Trainer's arguments.
        """
        return enum_value(training.optim)

    def claim_state(self) -> None:
        """Tell a memory ledger that was just entered what is state, where the optimizer does not show it."""

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

    def save(self, trainer: Trainer, output_folder: Path, *, base_name: str, coordinator: LaunchCoordinator) -> Saved:
        """Write what was trained, when it is. All processes call it, and the first writes.

        Args:
            trainer: Holds the trained model.
            output_folder: The run's folder.
            base_name: Folder or hub id of the model that was fine-tuned.
            coordinator: The processes of the run.
        """
        folder = output_folder / MODEL_FOLDER
        with ExitStack() as stack:
            temporary = coordinator.decide(
                "temporary folder of the model", lambda: stack.enter_context(atomic.atomic_folder(folder))
            )
            save_whole_model(trainer, temporary)
        return Saved(model=folder)

    def close(self) -> None:
        """Take everything off the model, also after a failure."""


class DenseMethod(TrainingMethod):
    """All weights every update, as the Trainer does it."""

    name: Method = "dense"

    def __init__(self) -> None:
        self._engine_keeps_masters = False

    def attach(self, trainer: Trainer) -> None:
        """See whether DeepSpeed trains, which keeps fp32 masters itself."""
        self._engine_keeps_masters = layout_of(trainer.accelerator).startswith("zero")

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of weights without masters."""
        if self._engine_keeps_masters or all(each.dtype != torch.bfloat16 for each in model.parameters()):
            return []
        return ["dense fine-tuning of bf16 weights keeps no fp32 masters; updates below a weight's last bit are lost"]
