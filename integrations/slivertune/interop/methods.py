"""Methods under a stock Trainer: refused arguments, construction of the optimizer, start and end of a training."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core.options import enum_value
from slivertune.core.refused_pairs import refuse_together
from slivertune.core.sliver import Sliver
from slivertune.core.typed_command import setting_name
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.hift import HiFT, HiFTConfig
from slivertune.hift.unsupported import STEPPED_ONCE
from slivertune.hift.unsupported_optimizers import refuse_name
from slivertune.interop.checkpoints import load_state
from slivertune.sft import SFT, SFTConfig
from slivertune.tokentune import TokenTune


def check_base_optimizer(training: TrainingArguments) -> None:
    """Refuse base optimizers that HiFT can't rotate.

    Args:
        training: The Trainer's arguments; their `optim` names the optimizer.

    Raises:
        ValueError: If it can't be rotated; gives the reason.
    """
    refuse_name(enum_value(training.optim))


def check_best_model(training: TrainingArguments) -> None:
    """Refuse to load a best model at the end if its checkpoint has no deltas (SFT).

    Args:
        training: The Trainer's arguments on the best model and the content of checkpoints.

    Raises:
        ValueError: If the best model is loaded from checkpoints of the model alone.
    """
    if training.load_best_model_at_end and training.save_only_model:
        raise ValueError(
            "load_best_model_at_end does not go with save_only_model if SFT trains: the best checkpoint would have "
            "weights without their deltas. Leave out one of the two"
        )


def check_synced_reference(training: TrainingArguments, reason: str) -> None:
    """Refuse TRL's `sync_ref_model`, which copies each of the model's parameters to one of the reference's.

    Args:
        training: The Trainer's arguments; those of DPO, KTO, GRPO and RLOO have the setting.
        reason: Reason why the method can't support it.

    Raises:
        ValueError: If the setting is on.
    """
    if getattr(training, "sync_ref_model", False):
        raise ValueError(
            f"sync_ref_model=True copies all parameters of the model to the reference between steps, and {reason}. Set "
            "sync_ref_model=False"
        )


def check_one_norm(max_grad_norm: float | None, training: TrainingArguments) -> None:
    """Refuse a second limit of the gradient's norm beside the Trainer's, which clips first.

    Args:
        max_grad_norm: Limit in the settings of a method.
        training: The Trainer's arguments.

    Raises:
        ValueError: If both have a limit.
    """
    if max_grad_norm is not None and training.max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm={max_grad_norm:g} of slivertune's settings and max_grad_norm={training.max_grad_norm:g} of "
            "the Trainer's arguments would both clip. Leave out the former, or set the Trainer's to 0"
        )


def check_hift_settings(
    settings: HiFTConfig, training: TrainingArguments, written: Callable[[str, object], str]
) -> None:
    """Refuse settings of HiFT that do not go with each other or with the Trainer's arguments.

    Args:
        settings: Settings of HiFT.
        training: The Trainer's arguments.
        written: Writes a setting's name and value as its user does.

    Raises:
        ValueError: If there is such a pair.
    """
    waiting, weights, gradients = settings.waiting, settings.weights, settings.gradients
    if gradients == "stepped" and training.gradient_accumulation_steps > 1 and training.world_size > 1:
        raise ValueError(STEPPED_ONCE)
    gradients_written = written("gradients", gradients)
    refuse_together(
        {
            "quantised layers": None if waiting is None else written("waiting", waiting),
            "blocks on the host": written("weights", weights) if weights == "host" else None,
            "gradients='stepped'": gradients_written if gradients == "stepped" else None,
            "gradients='host'": gradients_written if gradients == "host" else None,
            "torch.compile": written("torch_compile", True) if training.torch_compile else None,
            "max_grad_norm": written("max_grad_norm", training.max_grad_norm) if training.max_grad_norm > 0 else None,
            "fp16": written("fp16", True) if training.fp16 else None,
        }
    )


class TrainerMethod:
    """Adapter of one method to a stock Trainer."""

    name: str
    """Name of the method in messages."""

    def check(self, config: Any, training: TrainingArguments) -> None:
        """Refuse settings and arguments that don't go together.

        Args:
            config: The method's settings.
            training: The Trainer's arguments.

        Raises:
            ValueError: If there is such an argument; names it and the way out.
        """

    def check_loss_weights(self, config: Any, names: Sequence[str]) -> None:
        """Refuse a loss with weights of its own, if they would not be trained.

        Args:
            config: The method's settings.
            names: Names of the loss's weights.

        Raises:
            ValueError: If they would not be trained; names them and the way out.
        """

    def settle(self, trainer: Trainer, model: nn.Module, config: Any, tune: TokenTune | None) -> Any:
        """Return the settings with a value in place of each `auto` that only a run can settle.

        Args:
            trainer: The Trainer.
            model: Its model, on its device.
            config: The method's settings.
            tune: Token selection of the run, if there is one.

        Raises:
            ValueError: If a value can't be settled.
        """
        return config

    def make(
        self, trainer: Trainer, model: nn.Module, config: Any, *, momentum: float, make_base: Callable[[], Any]
    ) -> Sliver:
        """Build the optimizer over a model.

        Args:
            trainer: The Trainer; its arguments have the learning rate and more.
            model: The Trainer's model, or its loss around the model if the loss has its own weights.
            config: The method's settings.
            momentum: Momentum of SM3.
            make_base: Function that makes the Trainer's own optimizer.

        Raises:
            ValueError: If the settings don't fit the model.
        """
        raise NotImplementedError

    def begin(self, optimizer: Any) -> None:
        """Attach to the model again, after `end`, before another training."""

    def start(self, optimizer: Any, num_updates: int) -> None:
        """Adapt to a training that begins, and is not resumed.

        Args:
            optimizer: The optimizer in use, which may have trained before.
            num_updates: Updates of the training.
        """

    def save_beside(self, optimizer: Any, folder: Path, base_name: str | None) -> None:
        """Save what `trainer.save_model` leaves out. A collective.

        Args:
            optimizer: The optimizer in use.
            folder: Folder of the saved model.
            base_name: Folder or hub id of the model before the training, if known.
        """

    def end(self, optimizer: Any) -> None:
        """Detach from the model after a training, even a failed one."""

    def notes(self, optimizer: Any, num_updates: int, num_warmup: int) -> list[str]:
        """Return warnings for the start of a training.

        Args:
            optimizer: The optimizer in use.
            num_updates: Updates of the training.
            num_warmup: Updates of its warm-up.
        """
        return []

    def load_best(self, optimizer: Any, checkpoint: Path) -> None:
        """Load the state that belongs to the best model's weights, which the Trainer has just loaded. A collective.

        Args:
            optimizer: The optimizer in use.
            checkpoint: Checkpoint of the best model.
        """


class TrainerHiFT(TrainerMethod):
    """HiFT around the Trainer's own optimizer. No parameter stays frozen between trainings."""

    name = "HiFT"

    def check(self, config: HiFTConfig, training: TrainingArguments) -> None:
        """Refuse optimizers that can't be rotated, and arguments that act between a gradient and its step."""
        check_base_optimizer(training)
        if config.waiting is not None:
            check_synced_reference(training, f"waiting={config.waiting!r} holds NaN there in place of idle weights")
            if getattr(training, "use_vllm", False):
                raise ValueError(
                    f"use_vllm=True copies all parameters of the model to vLLM between steps, and "
                    f"waiting={config.waiting!r} holds NaN in place of idle weights. Set use_vllm=False, or train "
                    "without waiting"
                )
        check_one_norm(config.max_grad_norm, training)
        check_hift_settings(config, training, "{}={!r}".format)

    def settle(self, trainer: Trainer, model: nn.Module, config: HiFTConfig, tune: TokenTune | None) -> HiFTConfig:
        """Choose the layers per group, if they are `auto`."""
        if config.layers_per_group != "auto":
            return config
        from slivertune.interop.auto_layers import settle_layers  # imports the planner, which no other run needs

        return settle_layers(trainer, model, config, tune)

    def make(
        self, trainer: Trainer, model: nn.Module, config: HiFTConfig, *, momentum: float, make_base: Callable[[], Any]
    ) -> HiFT:
        """Wrap the Trainer's optimizer."""
        return HiFT.wrap(make_base(), model, config=config)

    def notes(self, optimizer: HiFT, num_updates: int, num_warmup: int) -> list[str]:
        """Warn of a training that ends before each group has had a turn, and of a warm-up shorter than a cycle."""
        return [note for note in (short_run(num_updates, optimizer), short_warmup(num_warmup, optimizer)) if note]

    def begin(self, optimizer: HiFT) -> None:
        """Freeze the parameters of inactive groups again."""
        optimizer.reattach()

    def start(self, optimizer: HiFT, num_updates: int) -> None:
        """Read the learning rate anew, since a new training has a new schedule, also in the middle of a cycle."""
        optimizer.forget_held_lr()

    def end(self, optimizer: HiFT) -> None:
        """Make all parameters require a gradient again. Evaluation goes on, also with weights on the host."""
        try:
            optimizer.detach(for_inference=True)
        except OSError as error:
            warnings.warn(
                f"the training is complete, but its model can't be evaluated where it lies: {error}. Save it, or move "
                "it (model.to('cpu'))",
                UserWarning,
                stacklevel=2,
            )


class TrainerSFT(TrainerMethod):
    """SFT with the Trainer's learning rate and weight decay. AdamW also takes its betas and epsilon."""

    name = "SFT"

    def check(self, config: SFTConfig, training: TrainingArguments) -> None:
        """Refuse to load best weights whose deltas are not saved, and to copy deltas to a reference model."""
        check_best_model(training)
        check_one_norm(config.max_grad_norm, training)
        check_synced_reference(training, "SFT's deltas are parameters that the reference does not have")

    def check_loss_weights(self, config: SFTConfig, names: Sequence[str]) -> None:
        """Refuse the default targets, the linear layers of the model's blocks, because they leave the loss out."""
        if config.targets is None:
            raise ValueError(
                f"the loss has weights of its own ({', '.join(names)}), and SFT trains only the linear layers of the "
                f"model's blocks. Add them to the targets, as in SFTConfig(targets=[..., {names[0]!r}]), or train by "
                "HiFT, which trains all"
            )

    def make(
        self, trainer: Trainer, model: nn.Module, config: SFTConfig, *, momentum: float, make_base: Callable[[], Any]
    ) -> SFT:
        """Build SFT from the Trainer's arguments."""
        arguments = trainer.args
        adam: dict[str, Any] = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
        return SFT(
            model,
            config=config,
            lr=arguments.learning_rate,
            total_steps=count_updates(trainer),
            weight_decay=arguments.weight_decay,
            momentum=momentum,
            **(adam if config.selection == "accumulated_gradient" else {}),
        )

    def start(self, optimizer: SFT, num_updates: int) -> None:
        """Let the replacement rate fall to zero over this training, which may have another length than was expected.

        Its batch size or its arguments may have changed since. A second training goes on with the first one's schedule.
        """
        if num_updates != optimizer.total_steps and not optimizer.updates:
            optimizer.set_total_steps(num_updates)

    def notes(self, optimizer: SFT, num_updates: int, num_warmup: int) -> list[str]:
        """Warn of a second training whose updates the schedule of the first one does not cover."""
        last, total = optimizer.updates + num_updates, optimizer.total_steps
        if last <= total or not optimizer.config.reselection_interval:
            return []
        note = (
            f"SFT reselects weights up to update {total}, and this training goes on to {last}: its choice stays as it "
            "is from there. Attach SFT to a new Trainer to choose again"
        )
        return [note]

    def save_beside(self, optimizer: SFT, folder: Path, base_name: str | None) -> None:
        """Save the deltas beside a model whose weights do not hold them."""
        if optimizer.is_merged or not optimizer.is_attached:
            return
        optimizer.save_pretrained(folder, base_model_name=base_name)
        warnings.warn(
            f"the model in {folder} has its pretrained weights, and the deltas are beside it ({DELTA_FILE}). "
            f"slivertune.deltas.apply(model, {str(folder)!r}) adds them",
            UserWarning,
            stacklevel=3,
        )

    def load_best(self, optimizer: SFT, checkpoint: Path) -> None:
        """Load the best model's deltas. Otherwise its weights would count as pretrained ones."""
        load_state(optimizer, checkpoint)


_methods: dict[type, TrainerMethod] = {HiFTConfig: TrainerHiFT(), SFTConfig: TrainerSFT()}


def register_trainer_method(config_class: type, method: TrainerMethod) -> None:
    """Let `slivertune.attach` accept the settings of another package's method.

    Args:
        config_class: Class of the settings.
        method: Adapter of the method to a Trainer.
    """
    _methods[config_class] = method


def method_of(setting: object) -> TrainerMethod | None:
    """Return the method of a settings object, or None for any other object."""
    return next((method for config_class, method in _methods.items() if isinstance(setting, config_class)), None)


_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")
"""Schedules that do not read `warmup_steps`."""


class AtStart(TrainerCallback):
    """Adapts a method to a training that begins and is not resumed, and warns of its notes on the first rank.

    Args:
        method: Method that has the notes.
        optimizer: Function that returns its optimizer.
    """

    def __init__(self, method: TrainerMethod, optimizer: Callable[[], Any]) -> None:
        self._method = method
        self._optimizer = optimizer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adapt the method, and warn of each note."""
        optimizer = self._optimizer()
        is_resumed = state.global_step > 0
        if is_resumed or optimizer is None:  # it could not be attached
            return
        self._method.start(optimizer, state.max_steps)
        if not state.is_world_process_zero:
            return
        schedule = enum_value(args.lr_scheduler_type)
        num_warmup = 0 if schedule in _WITHOUT_WARMUP else args.get_warmup_steps(state.max_steps)
        for note in self._method.notes(optimizer, state.max_steps, num_warmup):
            warnings.warn(note, UserWarning, stacklevel=2)


def short_run(num_updates: int, hift: HiFT) -> str | None:
    """Say how many groups a training is too short for, or return None if each has a turn.

    Args:
        num_updates: Updates of the training.
        hift: HiFT that makes them.
    """
    per_turn, num_groups = hift.config.steps_per_group, hift.num_groups
    num_trained = -(-num_updates // per_turn)
    if num_trained >= num_groups:
        return None
    steps, layers = (setting_name(f"--{name}", name) for name in ("steps_per_group", "layers_per_group"))
    lower = f"lower {steps} to {num_updates // num_groups}, " if num_updates >= num_groups else ""
    return (
        f"{num_groups - num_trained} of {num_groups} groups of HiFT never train: the training ends after {num_updates} "
        f"updates, and each turn takes {per_turn}. Raise {layers}, {lower}or train longer"
    )


def short_warmup(num_warmup: int, hift: HiFT) -> str | None:
    """Say that a warm-up ends within a cycle, which holds the rate of its beginning, or return None.

    Args:
        num_warmup: Updates of the warm-up.
        hift: HiFT that holds the rate.
    """
    if not 1 < num_warmup < hift.cycle_length:
        return None
    warmup, steps = (setting_name(f"--{name}", name) for name in ("warmup_steps", "steps_per_group"))
    return (
        f"the warm-up of {num_warmup} updates is shorter than HiFT's cycle of {hift.cycle_length}, which holds one "
        f"rate. The first cycle trains at 1/{num_warmup} of the peak rate. Set {warmup} to 0 or to several cycles, or "
        f"lower {steps}"
    )


def count_updates(trainer: Trainer) -> int:
    """Count the updates of a run, as the Trainer does at its start.

    Args:
        trainer: A Trainer with a training set of known length, or with `max_steps`.

    Returns:
        `max_steps` if it is set, else epochs times updates per epoch. The last batches of an epoch make an update even
        if they are fewer than `gradient_accumulation_steps`.
    """
    arguments = trainer.args
    if arguments.max_steps >= 0:
        return arguments.max_steps
    updates_per_epoch = max(1, math.ceil(len(trainer.get_train_dataloader()) / arguments.gradient_accumulation_steps))
    return math.ceil(arguments.num_train_epochs * updates_per_epoch)
