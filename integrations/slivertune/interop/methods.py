"""Methods under a stock Trainer: refused arguments, construction of the optimizer, start and end of a training."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from slivertune.core.refused_pairs import refuse_together
from slivertune.core.sliver import Sliver
from slivertune.hift import HiFT, HiFTConfig
from slivertune.hift.unsupported_optimizers import refuse_name
from slivertune.interop.checkpoints import load_state
from slivertune.sft import SFT, SFTConfig


def check_base_optimizer(training: TrainingArguments) -> None:
    """Refuse base optimizers that HiFT can't rotate.

    Args:
        training: The Trainer's arguments; their `optim` names the optimizer.

    Raises:
        ValueError: If it can't be rotated; gives the reason.
    """
    refuse_name(str(getattr(training.optim, "value", training.optim)))


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

    def end(self, optimizer: Any) -> None:
        """Detach from the model after a training, even a failed one."""

    def load_best(self, optimizer: Any, checkpoint: Path) -> None:
        """Load the state that belongs to the best model's weights, which the Trainer has just loaded. A collective.

        Args:
            optimizer: The optimizer in use.
            checkpoint: Checkpoint of the best model.
        """


class TrainerHiFT(TrainerMethod):
    """HiFT around the Trainer's own optimizer; no parameter stays frozen between trainings."""

    name = "HiFT"

    def check(self, config: HiFTConfig, training: TrainingArguments) -> None:
        """Refuse optimizers that can't be rotated, and arguments that act between a gradient and its step."""
        check_base_optimizer(training)
        if config.waiting is not None:
            check_synced_reference(training, f"waiting={config.waiting!r} holds NaN there in place of idle weights")
        refuse_together(
            {
                "waiting": None if config.waiting is None else f"waiting={config.waiting!r}",
                "weights='host'": "weights='host'" if config.weights == "host" else None,
                "torch.compile": "torch_compile=True" if training.torch_compile else None,
            }
        )
        if config.steps_in_backward and (training.max_grad_norm > 0 or training.fp16):
            raise ValueError(
                "gradients='stepped' leaves no gradients to clip or unscale. Set max_grad_norm=0 and fp16=False in the "
                "Trainer's arguments, or gradients='host', which can be clipped"
            )
        if config.gradients == "host" and training.fp16:
            raise ValueError("gradients='host' leaves no gradients on the device to unscale. Use bf16, not fp16")

    def make(
        self, trainer: Trainer, model: nn.Module, config: HiFTConfig, *, momentum: float, make_base: Callable[[], Any]
    ) -> HiFT:
        """Wrap the Trainer's optimizer."""
        return HiFT.wrap(make_base(), model, config=config)

    def begin(self, optimizer: HiFT) -> None:
        """Freeze the parameters of inactive groups again."""
        optimizer.reattach()

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
    """SFT with the Trainer's learning rate and weight decay; AdamW also takes its betas and epsilon."""

    name = "SFT"

    def check(self, config: SFTConfig, training: TrainingArguments) -> None:
        """Refuse to load best weights whose deltas are not saved, and to copy deltas to a reference model."""
        check_best_model(training)
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

    def load_best(self, optimizer: SFT, checkpoint: Path) -> None:
        """Load the best model's deltas; otherwise its weights would count as pretrained ones."""
        load_state(optimizer, checkpoint)


_methods: dict[type, TrainerMethod] = {HiFTConfig: TrainerHiFT(), SFTConfig: TrainerSFT()}


def register_method(config_class: type, method: TrainerMethod) -> None:
    """Let `slivertune.attach` accept the settings of another package's method.

    Args:
        config_class: Class of the settings.
        method: Adapter of the method to a Trainer.
    """
    _methods[config_class] = method


def method_of(setting: object) -> TrainerMethod | None:
    """Return the method of a settings object; None for any other object."""
    return next((method for config_class, method in _methods.items() if isinstance(setting, config_class)), None)


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
