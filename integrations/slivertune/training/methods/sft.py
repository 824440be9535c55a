"""`--method sft`: trains a sparse choice of weights, dropped and regrown during training (arXiv 2401.16405)."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from slivertune.core.atomic import atomic_file
from slivertune.deltas.beside_weights import TEMPLATE
from slivertune.interop.checkpoints import holds_state
from slivertune.interop.methods import check_best_model
from slivertune.parallel.layout import layout_of
from slivertune.sft.targets import is_4bit
from slivertune.sft.unsupported import clash_of_parking
from slivertune.training.methods.method import FEWEST_UPDATES_A_LINE, Saved, SliverMethod
from slivertune.training.models import LoadedModel, is_not_about_codes
from slivertune.training.options.methods import SFT, SFTOptions
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.tasks.task import Task

EMBEDDED_DENSITY = 0.05
"""Share of the embedded model's block weights, which are few: LoRA of rank 64 has two thirds as many weights."""
RATE_HINT = (
    "the paper trains a 7B model with 1e-4 by AdamW and 1e-3 by SM3 (--selection momentum). --learning_rate was not "
    "given, so {rate:g} is used"
)
_AMOUNTS = ("density", "num_weights", "equivalent_lora_rank")
"""Options that set the number of trained weights. At most one of them is given."""
_TRAINER_LOG = logging.getLogger(Trainer.__module__)


class SFTMethod(SliverMethod):
    """SFT as the Trainer's optimizer. Whole weights hold the sums. 4-bit and sharded weights have separate deltas.

    A checkpoint's weights are the sums, or the unchanged weights. Its optimizer state has the deltas, the pretrained
    values and an open estimation phase.
    """

    about = SFT
    bf16_use = "weights"
    takes_4bit = True
    parks = True
    is_optimizer = True
    is_planned_on_ranks = True
    options: SFTOptions

    _has_4bit = False
    _is_sharded = False

    def __init__(self, options: SFTOptions) -> None:
        super().__init__(options)
        self.momentum = options.momentum

    @property
    def _is_merged(self) -> bool:
        """Whether the weights hold the sums. 4-bit, parked and sharded weights don't."""
        return not self._has_4bit and not self._is_sharded and self.parked is None

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a density and its best rate: for AdamW of 1e-3, 4e-3 and 8e-3, for SM3 of 1e-2 to 1e-1."""
        defaults = {"learning_rate": 1e-1 if given.get("selection") == "momentum" else 8e-3}
        if given.keys().isdisjoint(_AMOUNTS):
            defaults["density"] = EMBEDDED_DENSITY
        return defaults

    def check(self, given: frozenset[str], training: TrainingArguments) -> None:
        """Refuse to load the best model if its deltas are not saved, and settings that would be ignored."""
        check_best_model(training)
        if self.parked is not None and (clash := clash_of_parking(embeddings=self.options.embeddings)) is not None:
            raise ValueError(clash)
        is_by_momentum = self.options.selection == "momentum"
        for is_unread, names, reason in (
            (
                True,
                # Options of the Trainer about the optimizer that SFT replaces.
                ("optim", "optim_args", "optim_target_modules"),
                "--method sft is an optimizer itself: AdamW, or SM3 by --selection momentum. Leave it out",
            ),
            (
                is_by_momentum,
                ("estimation_steps", "adam_beta1", "adam_beta2", "adam_epsilon"),
                (
                    "--selection momentum trains by SM3, which has no estimation phase and no moments of Adam. "
                    "Leave it out"
                ),
            ),
            (
                not is_by_momentum,
                ("sft_momentum",),
                "only SM3 has momentum, with --selection momentum. Leave it out",
            ),
            (
                self.options.reselection_interval == 0,
                ("estimation_steps", "replacement_rate", "redistribute"),
                (
                    "--reselection_interval 0 keeps the first choice, so nothing is ever replaced. Leave out one of "
                    "the two"
                ),
            ),
        ):
            unread = ", ".join(f"--{name}" for name in sorted(given.intersection(names)))
            if is_unread and unread:
                raise ValueError(f"{unread}: {reason}")

    def follow(self, facts: Mapping[str, Any], given: frozenset[str]) -> None:
        """Copy the settings of the first run, except for what was typed now: its defaults may have been others."""
        # Each of these replaces the others.
        asked = given.union(_AMOUNTS) if given.intersection(_AMOUNTS) else given
        saved = facts.get("sft", {})
        followed = {name: value for name, value in saved.items() if name not in asked}
        self.options = self.about.replaced(self.options, followed)
        self.momentum = self.options.momentum

    def facts(self) -> dict[str, Any]:
        """Return all settings, since all decide which weights are trained, and how."""
        return {"sft": self.values(), "waiting": None if self.parked is None else self.parked.waiting}

    def adapt(self, loaded: LoadedModel, task: Task) -> Any:
        """Refuse a model with untrained weights, which sparse deltas can't make useful."""
        model: Any = loaded.model
        if loaded.new_modules:
            raise ValueError(
                f"{', '.join(loaded.new_modules)} of {type(model).__name__} is new, and --method sft trains a few of "
                "each tensor's weights, which can't make up for pretrained ones. Use --task prompt_classification, "
                "which needs no new head, or --method lora or hift, or a checkpoint that has the head"
            )
        self._has_4bit = any(map(is_4bit, model.parameters()))
        if self._has_4bit:
            # The Trainer refuses quantised models without PEFT. It reads this flag once, in its constructor.
            model.is_quantized = False
        return model

    def attach(self, trainer: Trainer) -> None:
        """Attach SFT to the Trainer as its optimizer.

        Raises:
            ValueError: If the settings don't fit the model, or the run would continue from weights without deltas.
        """
        checkpoint = trainer.args.resume_from_checkpoint
        # A checkpoint's weights are sums, and only its optimizer state holds their pretrained part.
        if checkpoint is not None and not holds_state(Path(checkpoint)) and not (Path(checkpoint) / "sft").exists():
            raise ValueError(
                f"{checkpoint} has no optimizer.pt, so its deltas can't be told from pretrained weights. Resume from "
                "a checkpoint that was saved without --save_only_model, or start again"
            )
        self._is_sharded = layout_of(trainer.accelerator) in ("fsdp2", "zero3")
        if self.parked is not None:
            self.options = replace(self.options, form="layer")
        names = self.options.targets
        if self._has_4bit:
            model: Any = trainer.model
            model.is_quantized = True
            _TRAINER_LOG.addFilter(is_not_about_codes)
        try:
            super().attach(trainer)
        except ValueError as error:
            if self.parked is not None and "the layer form takes" in str(error):
                raise ValueError(
                    f"{str(error).partition(', and the layer form')[0]}, whose weights can't train beside parked ones. "
                    "Leave out --waiting and --weights, or name others by --sft_target_modules"
                ) from error
            if names is None or "targets has" not in str(error):
                raise
            raise ValueError(f"--sft_target_modules {' '.join(map(str, names))}: {error}") from error

    def num_trained(self, num_trainable: int) -> int:
        """Return the number of weights that are trained at any time."""
        return int(self.optimizer.num_weights)

    def optimizer_name(self, training: TrainingArguments) -> str:
        """Return the name of the update rule."""
        return "sft_sm3" if self.options.selection == "momentum" else "sft_adamw"

    def claim_state(self) -> None:
        """Claim positions, deltas, pretrained values and moments. The deltas are also model parameters."""
        self.optimizer.claim_state()

    def logging_steps(self) -> int:
        """Return the updates between two reselections, or between several if these are frequent."""
        interval = self.options.reselection_interval or FEWEST_UPDATES_A_LINE
        return interval * math.ceil(FEWEST_UPDATES_A_LINE / interval)

    def lines(self) -> list[str]:
        """Describe the number of trained weights and tensors, and the choice of the weights."""
        sizes = self.optimizer.num_elements.values()
        count = self.optimizer.num_weights
        kind = "4-bit" if self._has_4bit else "parked" if self.parked is not None else "sharded"
        place = "in the weights" if self._is_merged else f"beside {kind} weights"
        return [
            f"  sft     {count:,} weights of {len(sizes)} tensors ({count / sum(sizes):.2%} of theirs), deltas {place}",
            f"  chosen  {self._schedule()}",
        ]

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of a default learning rate that is meant for dense fine-tuning."""
        return [] if learning_rate is None else [RATE_HINT.format(rate=learning_rate)]

    def settings(self) -> dict[str, Any]:
        """Return SFT's settings and the number of tensors with trained weights."""
        return {**self.values(), "num_tensors": len(self.optimizer.num_elements)}

    def save(self, trainer: Trainer, output_folder: Path, *, base_name: str, coordinator: LaunchCoordinator) -> Saved:
        """Save the deltas with the chat template, and also the merged model if the weights hold the sums."""
        folder = output_folder / "delta"
        self.optimizer.save_pretrained(folder, base_model_name=base_name)
        template = getattr(trainer.processing_class, "chat_template", None)
        if coordinator.is_first and isinstance(template, str):
            with atomic_file(folder / TEMPLATE) as path:
                path.write_text(template, encoding="utf-8")
        if self._is_merged:
            saved = super().save(trainer, output_folder, base_name=base_name, coordinator=coordinator)
            return Saved(model_folder=saved.model_folder, delta_folder=folder)
        command = ["slivertune", "merge", str(folder), "--model_name_or_path", base_name]
        command += ["--allow_quantized_base"] if self._has_4bit else []
        return Saved(
            model_folder=None,
            delta_folder=folder,
            merge_command=(*command, "--output_dir", str(output_folder / "merged")),
        )

    def close(self) -> None:
        """Detach SFT from the model. Weights that hold the sums keep the deltas."""
        _TRAINER_LOG.removeFilter(is_not_about_codes)
        if self._attached is not None:
            self._attached.detach(merge=self._is_merged)

    def _schedule(self) -> str:
        interval = self.options.reselection_interval
        if interval == 0:
            return "at random, once for the whole run"
        if self.options.selection == "momentum":
            return f"by SM3's accumulators, anew every {interval} updates"
        steps = self.options.estimation_steps
        return f"by gradients accumulated over {steps} updates, at update {steps} and then every {interval} updates"
