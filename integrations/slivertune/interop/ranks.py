"""Compares the ranks where a Trainer keeps their work, and names who is missing when it saves."""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.parallel.consistency.explain import compare_now, explain


class CompareRanks(TrainerCallback):
    """Compares what all ranks must have alike at every checkpoint and at the end of the training.

    Args:
        trainer: Its Accelerator has prepared what trains.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare. A collective."""
        compare_now(self._trainer.accelerator)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare. A collective."""
        compare_now(self._trainer.accelerator)


def watch_ranks(trainer: Trainer) -> None:
    """Compare the ranks of a Trainer, and explain what fails when it saves.

    Args:
        trainer: Its saving is overridden, on this instance.
    """
    trainer.add_callback(CompareRanks(trainer))
    explain(trainer, "_save_checkpoint", "saving a checkpoint")
    explain(trainer, "save_model", "saving the model")
