"""The interface of a method of `slivertune train`."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, Trainer, TrainerState, TrainingArguments

from slivertune.core import atomic
from slivertune.core.options import enum_value
from slivertune.interop import attach
from slivertune.interop.methods import TrainerMethod
from slivertune.parallel.checkpoint.sidecar import Sidecar
from slivertune.parked import ParkedLayers, park_layers
from slivertune.planning.methods import PlannedMethod
from slivertune.planning.request import PlanRequest
from slivertune.training.models import Bf16Use, LoadedModel
from slivertune.training.options.arguments import ParkedArguments
from slivertune.training.options.methods import MethodOptions
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.ranks.processes import save_whole_model
from slivertune.training.tasks.task import Task

FEWEST_UPDATES_A_LINE = 8
"""Minimum number of updates per line of the log and of the memory ledger. Shorter cycles share a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The results that a run saves, besides its checkpoints."""

    model_folder: Path | None
    """Folder `model` of the run: the trained model without optimizer state. None if only deltas are saved."""
    delta_folder: Path | None = None
    """Folder `delta` of the run: SFT's deltas."""
    merge_command: tuple[str, ...] | None = None
    """Command that makes a model from the deltas. None if the model is saved."""


class TrainingMethod:
    """A training method. A subclass overrides the parts that differ from the stock Trainer.

    Class attributes define the command line and its help, so they are read before an instance exists. An instance is
    made from its options. Its methods are then called in this order: `check`, `follow` if the run is resumed, `facts`,
    `adapt` with the model, `settle`, `attach` with the Trainer that was made for the model, then the rest.

    Args:
        options: Instance of `about.options_class`, with the given options.
    """

    about: ClassVar[MethodOptions]
    """Name of the method, and the options that it alone reads."""
    requires: ClassVar[str | None] = None
    """Library that the method needs, by its name for import and pip. None if it needs no further one."""
    bf16_use: ClassVar[Bf16Use] = "autocast"
    """Meaning of `--bf16`."""
    takes_4bit: ClassVar[bool] = False
    """Whether the method trains beside weights in 4 bits, which can't be changed themselves."""
    parks: ClassVar[bool] = False
    """Whether the method leaves weights of blocks frozen, which can be parked (`--waiting`, `--weights host`)."""
    is_optimizer: ClassVar[bool] = False
    """Whether the method replaces the optimizer that `--optim` names."""
    is_planned_on_ranks: ClassVar[bool] = False
    """Whether a run on several GPUs has a planned peak memory."""
    planned: ClassVar[PlannedMethod | None] = None
    """Planner of another package's method. Without one, the method has no plan."""
    adapters: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Dotted names of modules of another package's method, by layout: ddp, fsdp2, zero (`register_adapters`)."""
    sidecar: ClassVar[Callable[[Any], Sidecar] | None] = None
    """Function that makes the sidecar of another package's optimizer (`register_sidecar`)."""
    kept_settings: ClassVar[tuple[str, ...]] = ()
    """Options of the method that a run's settings file has also where they were not given."""
    not_planned: ClassVar[tuple[str, ...]] = ()
    """Options of the method that affect memory and that a plan does not support."""

    parked: ParkedArguments | None = None
    """Form and place of weights that do not train now, if they are to be parked."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def name(self) -> str:
        """Name after `--method`."""
        return self.about.name

    def values(self) -> dict[str, Any]:
        """Return the values of the method's options by name, as plain JSON."""
        return self.about.values(self.options)

    @classmethod
    def preset_values(cls, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a preset of the method, which typed ones replace. By default there are none.

        Args:
            typed: Values that the user typed, by name.
        """
        return {}

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the method's defaults on the embedded model, for its options and for `TrainingArguments`.

        Args:
            given: Values that the user typed, by name.
        """
        return {}

    def check(self, given: frozenset[str], training: TrainingArguments) -> None:
        """Refuse settings that do not fit the method, before anything is loaded.

        Args:
            given: Names of the arguments that the user set.
            training: Arguments of the Trainer.

        Raises:
            ValueError: If a setting does not fit; names the argument and the way out.
        """

    @property
    def steps_in_backward(self) -> bool:
        """Whether updates are made inside the backward, so that none can be skipped."""
        return False

    def facts(self) -> dict[str, Any]:
        """Return as plain JSON the settings that a resumed run must share with the first, besides the method's name."""
        return {}

    def follow(self, facts: Mapping[str, Any], given: frozenset[str]) -> None:
        """Copy settings that were not typed from the checkpoint of a resumed run. By default it does nothing.

        Args:
            facts: Facts that the checkpoint carries.
            given: Names of the options that were typed.
        """

    def settle(self, request: Callable[[], PlanRequest], config: PreTrainedConfig, say: Callable[[str], None]) -> None:
        """Choose the values of automatic settings, before `attach`. By default it does nothing.

        Args:
            request: Function that returns the plan request of the run.
            config: Configuration of the model.
            say: Function that shows a line about each attempt and about the choice.

        Raises:
            ValueError: If no value fits.
        """

    def adapt(self, loaded: LoadedModel, task: Task) -> Any:
        """Change the model before the Trainer gets it.

        Args:
            loaded: Model as it was loaded, with all weights trainable unless they are quantised.
            task: Task of the run.

        Returns:
            The model to train.

        Raises:
            ValueError: If the options don't fit the model.
        """
        return loaded.model

    def attach(self, trainer: Trainer) -> None:
        """Attach the method to a Trainer that has not trained yet.

        Args:
            trainer: Trainer without an optimizer.

        Raises:
            ValueError: If the options don't fit the model.
        """

    def park(self, model: torch.nn.Module, parked: ParkedArguments) -> ParkedLayers | None:
        """Park the frozen weights, after `adapt` or, if the method is an optimizer, after `attach`.

        Args:
            model: Model to train.
            parked: Form and place of its weights.

        Returns:
            Handle. None if the method parks weights by itself.
        """
        return park_layers(
            model, form=parked.waiting or "exact", place=parked.weights, resident_bytes=parked.blocks_bytes
        )

    def num_trained(self, num_trainable: int) -> int:
        """Return the number of trained weights.

        Args:
            num_trainable: Number of weights that required gradients before `attach`.
        """
        return num_trainable

    def optimizer_name(self, training: TrainingArguments) -> str:
        """Return the optimizer's name for the results.

        Args:
            training: Arguments of the Trainer.
        """
        return enum_value(training.optim)

    def claim_state(self) -> None:
        """Claim the optimizer state in a memory ledger that was just entered, if the optimizer does not show it."""

    def cycle(self, state: TrainerState) -> tuple[int, str]:
        """Count the lines of the memory ledger, by default one per `logging_steps` updates.

        Args:
            state: State of the Trainer.

        Returns:
            Number of lines that are due so far, and the label of the last one.
        """
        num_steps = max(1, int(state.logging_steps))
        num_done = state.global_step // num_steps
        return num_done, f"step {num_done * num_steps:>4}"

    def logging_steps(self) -> int:
        """Return the default number of updates between two log lines."""
        return FEWEST_UPDATES_A_LINE

    def lines(self) -> list[str]:
        """Return lines about the method, shown before training."""
        return []

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Return notes about settings that the user may have overlooked.

        Args:
            model: Model that is trained.
            learning_rate: Default rate of the library; None if the user or the embedded default gave another.
        """
        return []

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the results, as plain JSON."""
        return {}

    def save(self, trainer: Trainer, output_folder: Path, *, base_name: str, coordinator: LaunchCoordinator) -> Saved:
        """Save the trained model. All processes call this after training, and the first writes.

        Args:
            trainer: Trainer with the trained model.
            output_folder: Folder of the run.
            base_name: Folder or hub id of the model that was fine-tuned.
            coordinator: Coordinator of the run's processes.
        """
        folder = output_folder / "model"
        with ExitStack() as stack:
            temporary = coordinator.decide(
                "temporary folder of the model", lambda: stack.enter_context(atomic.atomic_folder(folder))
            )
            save_whole_model(trainer, temporary)
        return Saved(model_folder=folder)

    def close(self) -> None:
        """Detach everything from the model, also after a failure."""


class SliverMethod(TrainingMethod):
    """A method whose optimizer `slivertune.attach` attaches to the Trainer.

    Its options have a method `config(seed)`, which returns the settings for `slivertune.attach`.
    """

    trainer_method: ClassVar[tuple[type, TrainerMethod] | None] = None
    """Settings class and Trainer integration of another package's optimizer. `slivertune.attach` knows them once the
    method is registered."""
    momentum: float = 0.0
    """Momentum of SM3, in [0, 1)."""
    _attached: Any = None

    @property
    def optimizer(self) -> Any:
        """The attached optimizer.

        Raises:
            RuntimeError: If none is attached.
        """
        if self._attached is None:
            raise RuntimeError(f"{self.name} is not attached to a Trainer. Call attach first")
        return self._attached

    def attach(self, trainer: Trainer) -> None:
        """Attach the method's optimizer to the Trainer."""
        self._attached = attach(trainer, self.options.config(trainer.args.seed), momentum=self.momentum).optimizer

    def close(self) -> None:
        """Detach the optimizer from the model."""
        if self._attached is not None:
            self._attached.detach()
