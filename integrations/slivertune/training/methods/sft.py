"""`--method sft`: a sparse choice of weights, dropped and grown again while it trains (arXiv 2401.16405)."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from slivertune.interop import attach
from slivertune.interop.checkpoints import holds_state
from slivertune.parallel.layout import layout_of
from slivertune.sft import SFT
from slivertune.sft.targets import is_4bit
from slivertune.training.methods.four_bit import SilenceAboutCodes, admitted_by_trainer
from slivertune.training.methods.method import FEWEST_UPDATES_A_LINE, Saved, TrainingMethod
from slivertune.training.options.method import Method
from slivertune.training.options.sft import SFTArguments
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.tasks.task import Task

DELTA_FOLDER = "delta"
"""Where the deltas lie in a run's folder."""
RATE_HINT = (
    "the paper trains a model of 7B with 1e-4 by AdamW and 1e-3 by SM3 (--selection momentum); --learning_rate was not "
    "given, so {rate:g} is used"
)
_OPTIMIZER_FILE = "optimizer.pt"


class SFTMethod(TrainingMethod):
    """SFT as the Trainer's optimizer; dense weights hold the sums, 4-bit and sharded ones get the deltas beside them.

    A checkpoint's weights are the sums, or what they were; its optimizer state has the deltas, the pretrained values
    and an open estimation phase.

    Args:
        arguments: SFT's settings.
        seed: The run's seed.
    """

    name: Method = "sft"

    def __init__(self, arguments: SFTArguments, seed: int) -> None:
        self._arguments = arguments
        self._seed = seed
        self._attached: SFT | None = None
        self._has_4bit = False
        self._is_sharded = False
        self._silence = SilenceAboutCodes()

    @property
    def _is_merged(self) -> bool:
        """Whether the weights hold the sums; codes don't, nor do weights of which a rank holds a share."""
        return not self._has_4bit and not self._is_sharded

    @property
    def optimizer(self) -> SFT:
        """The optimizer.

        Raises:
            RuntimeError: If it is not attached.
        """
        if self._attached is None:
            raise RuntimeError("SFT is attached to no Trainer; call attach first")
        return self._attached

    def facts(self) -> dict[str, Any]:
        """What decides which weights are trained, and how: all settings."""
        return {"sft": asdict(self._arguments)}

    def adapt(self, model: PreTrainedModel, task: Task, new_modules: Collection[str]) -> Any:
        """Refuse a model with weights that were never trained; deltas of a share of them would not make them useful."""
        if new_modules:
            raise ValueError(
                f"{', '.join(sorted(new_modules))} of {type(model).__name__} is new, and --method sft trains a few of "
                "each tensor's weights, which can't make up for pretrained ones; take --task prompt_classification, "
                "which needs no new head, or --method lora or hift, or a checkpoint that has the head"
            )
        self._has_4bit = any(map(is_4bit, model.parameters()))
        return model

    def admit(self, model: Any) -> AbstractContextManager[None]:
        """Let the Trainer take 4-bit weights."""
        return admitted_by_trainer(model) if self._has_4bit else nullcontext()

    def attach(self, trainer: Trainer) -> None:
        """Make SFT the Trainer's optimizer.

        Raises:
            ValueError: If the settings don't fit the model, or the run is to continue from weights without deltas.
        """
        _check_checkpoint(trainer.args.resume_from_checkpoint)
        config = self._arguments.config(self._seed)
        self._is_sharded = layout_of(trainer.accelerator) in ("fsdp2", "zero3")
        try:
            optimizer = attach(trainer, config, momentum=self._arguments.sft_momentum).optimizer
        except ValueError as error:
            if config.targets is None or "targets has" not in str(error):
                raise
            names = " ".join(self._arguments.sft_target_modules or ())
            raise ValueError(f"--sft_target_modules {names}: {error}") from error
        assert isinstance(optimizer, SFT)
        self._attached = optimizer
        if self._has_4bit:
            self._silence.begin()

    def num_trained(self, num_trainable: int) -> int:
        """The weights that are active at any time."""
        return self.optimizer.num_weights

    def optimizer_name(self, training: TrainingArguments) -> str:
        """That of the update rule."""
        return "sft_sm3" if self._arguments.selection == "momentum" else "sft_adamw"

    def claim_state(self) -> None:
        """Claim positions, deltas, pretrained values and moments; the deltas are among the model's parameters."""
        self.optimizer.claim_state()

    def logging_steps(self) -> int:
        """A line for every reselection, or for several where one comes too soon."""
        interval = self._arguments.reselection_interval or FEWEST_UPDATES_A_LINE
        return interval * math.ceil(FEWEST_UPDATES_A_LINE / interval)

    def lines(self) -> list[str]:
        """How many weights of how many tensors, and how they are chosen."""
        sizes = self.optimizer.num_elements.values()
        count = self.optimizer.num_weights
        place = "in the weights" if self._is_merged else f"beside {'4-bit' if self._has_4bit else 'sharded'} weights"
        return [
            f"  sft     {count:,} weights of {len(sizes)} tensors ({count / sum(sizes):.2%} of theirs), deltas {place}",
            f"  chosen  {self._schedule()}",
        ]

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of a rate that is meant for dense fine-tuning."""
        return [] if learning_rate is None else [RATE_HINT.format(rate=learning_rate)]

    def settings(self) -> dict[str, Any]:
        """All of SFT's settings, and the number of tensors with trained weights."""
        return {**asdict(self._arguments), "num_tensors": len(self.optimizer.num_elements)}

    def save(self, trainer: Trainer, output_folder: Path, *, base_name: str, coordinator: LaunchCoordinator) -> Saved:
        """Write the deltas, and beside them the model with the deltas merged, if its weights hold them."""
        folder = output_folder / DELTA_FOLDER
        self.optimizer.save_pretrained(folder, base_model_name=base_name)
        if self._is_merged:
            saved = super().save(trainer, output_folder, base_name=base_name, coordinator=coordinator)
            return Saved(model=saved.model, deltas=folder)
        command = ["slivertune", "merge", str(folder), "--model_name_or_path", base_name]
        command += ["--allow_quantized_base"] if self._has_4bit else []
        return Saved(model=None, deltas=folder, merge_command=(*command, "--output_dir", str(output_folder / "merged")))

    def close(self) -> None:
        """Take SFT off the model; dense weights keep the deltas."""
        self._silence.end()
        if self._attached is not None:
            self._attached.detach(merge=self._is_merged)

    def _schedule(self) -> str:
        arguments = self._arguments
        interval = arguments.reselection_interval
        if interval == 0:
            return "at random, once for the whole run"
        if arguments.selection == "momentum":
            return f"by SM3's accumulators, anew every {interval} updates"
        steps = arguments.estimation_steps
        return f"by gradients accumulated over {steps} updates, at update {steps} and then every {interval} updates"


def _check_checkpoint(folder: str | None) -> None:
    """The weights of a checkpoint hold sums, whose pretrained part its optimizer state alone knows."""
    if folder is not None and not holds_state(Path(folder)) and not (Path(folder) / SFT.method).exists():
        raise ValueError(
            f"{folder} has no {_OPTIMIZER_FILE}, so its deltas can't be told from pretrained weights; resume from a "
            "checkpoint that was saved without --save_only_model, or start again"
        )
