"""What a method of `slivertune train` has to say and do."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, Trainer, TrainerState, TrainingArguments

from slivertune.core import atomic
from slivertune.interop import attach
from slivertune.interop.methods import TrainerMethod
from slivertune.planning.request import PlanRequest
from slivertune.training.models import Bf16Use, LoadedModel
from slivertune.training.options.arguments import enum_value
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.ranks.processes import save_whole_model
from slivertune.training.tasks.task import Task

FEWEST_UPDATES_A_LINE = 8
"""A cycle shorter than this shares its line with the next ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a run leaves behind, beside its checkpoints."""

    model_folder: Path | None
    """`model` in the run's folder: the trained model without optimizer state; None where deltas are all there is."""
    delta_folder: Path | None = None
    """`delta` in the run's folder: SFT's deltas."""
    merge_command: tuple[str, ...] | None = None
    """Makes a model of the deltas, where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """The options of a method that has none of its own."""


class TrainingMethod:
    """How a run trains; a subclass overrides what its method does otherwise than the stock Trainer.

    What stands on the class is asked before there is a method: the command line and its help are made of it. Then the
    method is made of its options, and the calls come in this order: `check`, `adapt` with the model, `attach` with the
    Trainer that was made for it, then the rest.

    Args:
        options: What was given for it; an instance of `options_class`.
    """

    name: ClassVar[str]
    """As typed after `--method`; also the folder of its runs."""
    help: ClassVar[str]
    """What it does, in a clause, for `--help`."""
    options_class: ClassVar[type] = NoOptions
    """A dataclass made for `transformers.HfArgumentParser`: options that this method alone reads."""
    requires: ClassVar[str | None] = None
    """A library that it needs, by its name for import and pip."""
    bf16_use: ClassVar[Bf16Use] = "autocast"
    """What `--bf16` means."""
    takes_4bit: ClassVar[bool] = False
    """Whether it trains beside weights in 4 bits, which can't be changed themselves."""
    is_optimizer: ClassVar[bool] = False
    """Whether it takes the place of the optimizer that `--optim` names."""
    is_planned_on_ranks: ClassVar[bool] = False
    """Whether a run on several GPUs has a planned peak."""
    not_planned: ClassVar[tuple[str, ...]] = ()
    """Its options that decide memory, and that a plan has no word for."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that are its own on the embedded model: of its options, and of `TrainingArguments`.

        Args:
            given: What the user typed, by name.
        """
        return {}

    def check(self, given: frozenset[str], training: TrainingArguments) -> None:
        """Refuse what does not go with it, before anything is loaded.

        Args:
            given: Names of the arguments that the user set.
            training: The Trainer's arguments.

        Raises:
            ValueError: Naming the argument and what to do.
        """

    @property
    def steps_in_backward(self) -> bool:
        """Whether updates are made inside the backward, so that none can be skipped."""
        return False

    def facts(self) -> dict[str, Any]:
        """What a resumed run must share with the first, beside the method's name; plain JSON."""
        return {}

    def follow(self, facts: Mapping[str, Any]) -> None:
        """Take over from a checkpoint what was left to be chosen; nothing by default.

        Args:
            facts: What it carries.
        """

    def settle(self, request: Callable[[], PlanRequest], config: PreTrainedConfig, say: Callable[[str], None]) -> None:
        """Choose what was left to be chosen, before `attach`; nothing by default.

        Args:
            request: Makes what `slivertune plan` would be asked for the run.
            config: The model's configuration.
            say: Told of what is tried and what was chosen.

        Raises:
            ValueError: If it can't be chosen.
        """

    def adapt(self, loaded: LoadedModel, task: Task) -> Any:
        """Change what the Trainer gets.

        Args:
            loaded: The model as it was loaded, every weight trainable unless it is quantised.
            task: What is learned.

        Returns:
            The model to train.

        Raises:
            ValueError: If the options don't fit the model.
        """
        return loaded.model

    def attach(self, trainer: Trainer) -> None:
        """Take part in a Trainer that has not trained yet.

        Args:
            trainer: Without an optimizer.

        Raises:
            ValueError: If the options don't fit the model.
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

    def plan_settings(self, precision: str) -> dict[str, Any]:
        """What a plan must know of it: fields of `planning.request.PlanRequest`.

        Args:
            precision: As the plan calls it; `bf16` is without fp32 masters, so a method that keeps them says
                `precision="mixed_hi"`.
        """
        return {}

    def claim_state(self) -> None:
        """Tell a memory ledger that was just entered what is state, where the optimizer does not show it."""

    def cycle(self, state: TrainerState) -> tuple[int, str]:
        """What makes a line of the memory ledger: as many updates as there are between two log lines.

        Args:
            state: The Trainer's.

        Returns:
            The lines that are due so far, and what to call the last of them.
        """
        num_steps = max(1, int(state.logging_steps))
        num_done = state.global_step // num_steps
        return num_done, f"step {num_done * num_steps:>4}"

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
        folder = output_folder / "model"
        with ExitStack() as stack:
            temporary = coordinator.decide(
                "temporary folder of the model", lambda: stack.enter_context(atomic.atomic_folder(folder))
            )
            save_whole_model(trainer, temporary)
        return Saved(model_folder=folder)

    def close(self) -> None:
        """Take everything off the model, also after a failure."""


class SliverMethod(TrainingMethod):
    """A method whose optimizer `slivertune.attach` makes the Trainer's.

    Its options have `config(seed)`, which makes settings that `attach` takes.
    """

    trainer_method: ClassVar[tuple[type, TrainerMethod] | None] = None
    """Of another package's optimizer: class of its settings, and how it trains under a Trainer, which `attach` knows
    once the method is registered."""
    momentum: float = 0.0
    """SM3's."""
    _attached: Any = None

    @property
    def optimizer(self) -> Any:
        """The optimizer.

        Raises:
            RuntimeError: If it is not attached.
        """
        if self._attached is None:
            raise RuntimeError(f"{self.name} is attached to no Trainer; call attach first")
        return self._attached

    def attach(self, trainer: Trainer) -> None:
        """Make it the Trainer's optimizer."""
        self._attached = attach(trainer, self.options.config(trainer.args.seed), momentum=self.momentum).optimizer

    def close(self) -> None:
        """Take it off the model."""
        if self._attached is not None:
            self._attached.detach()
