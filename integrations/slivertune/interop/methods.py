"""What a method owes to a stock Trainer: which arguments it refuses, its optimizer, what becomes of it in the end."""

import math
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
    """Refuse optimizers that HiFT can't rotate.

    Args:
        training: Its `optim` names the optimizer.

    Raises:
        ValueError: If it is one of them, with the reason.
    """
    refuse_name(str(getattr(training.optim, "value", training.optim)))


def check_best_model(training: TrainingArguments) -> None:
    """Refuse, for SFT, to bring back a best model whose checkpoint has no deltas.

    Args:
        training: Says whether the best model is loaded at the end, and what checkpoints hold.

    Raises:
        ValueError: If it is, and they hold the model alone.
    """
    if training.load_best_model_at_end and training.save_only_model:
        raise ValueError(
            "load_best_model_at_end does not go with save_only_model where SFT trains: the best checkpoint would have "
            "weights without the deltas that belong to them; leave out one of the two"
        )


def check_synced_reference(training: TrainingArguments, reason: str) -> None:
    """Refuse TRL's `sync_ref_model`, which copies each of the model's parameters to one of the reference's.

    Args:
        training: The Trainer's arguments; those of DPO, KTO, GRPO and RLOO say whether it does.
        reason: Why the method can't have that.

    Raises:
        ValueError: If it does.
    """
    if getattr(training, "sync_ref_model", False):
        raise ValueError(
            f"sync_ref_model=True copies all parameters of the model to the reference between steps, and {reason}. Set "
            "sync_ref_model=False"
        )


class TrainerMethod:
    """How one method trains under a stock Trainer."""

    name: str
    """For messages."""

    def check(self, config: Any, training: TrainingArguments) -> None:
        """Refuse what does not go together.

        Args:
            config: The method's settings.
            training: The Trainer's arguments.

        Raises:
            ValueError: Naming the argument and what to do.
        """

    def check_loss_weights(self, config: Any, names: Sequence[str]) -> None:
        """Refuse a loss that has weights of its own, where they would not be trained.

        Args:
            config: The method's settings.
            names: Of the weights.

        Raises:
            ValueError: Naming the weights and what to do.
        """

    def make(
        self, trainer: Trainer, model: nn.Module, config: Any, *, momentum: float, make_base: Callable[[], Any]
    ) -> Sliver:
        """Build the optimizer over a model.

        Args:
            trainer: Its arguments have the learning rate and more.
            model: The Trainer's, or its loss around it where that has weights of its own.
            config: The method's settings.
            momentum: SM3's.
            make_base: Makes the optimizer that the Trainer would make by itself.

        Raises:
            ValueError: If the settings don't fit the model.
        """
        raise NotImplementedError

    def begin(self, optimizer: Any) -> None:
        """Put on the model again what `end` took off, before another training."""

    def end(self, optimizer: Any) -> None:
        """Leave the model as any other after a training, also one that failed."""

    def load_best(self, optimizer: Any, checkpoint: Path) -> None:
        """Bring back what belongs to the best model's weights, which the Trainer has just loaded. A collective.

        Args:
            optimizer: The one in use.
            checkpoint: Of the best model.
        """


class TrainerHiFT(TrainerMethod):
    """HiFT around the Trainer's own optimizer; nothing is frozen between trainings."""

    name = "HiFT"

    def check(self, config: HiFTConfig, training: TrainingArguments) -> None:
        """Refuse optimizers that can't be rotated, and what would come between a gradient and its step."""
        check_base_optimizer(training)
        if config.waiting is not None:
            check_synced_reference(training, f"waiting={config.waiting!r} holds NaN there in place of waiting weights")
        refuse_together(
            {
                "waiting": None if config.waiting is None else f"waiting={config.waiting!r}",
                "weights='host'": "weights='host'" if config.weights == "host" else None,
                "torch.compile": "torch_compile=True" if training.torch_compile else None,
            }
        )
        if config.steps_in_backward and (training.max_grad_norm > 0 or training.fp16):
            raise ValueError(
                "gradients='stepped' leaves no gradients to clip or unscale; set max_grad_norm=0 and fp16=False in the "
                "Trainer's arguments, or gradients='host', which are clipped"
            )
        if config.gradients == "host" and training.fp16:
            raise ValueError("gradients='host' leaves no gradients on the device to unscale; take bf16, not fp16")

    def make(
        self, trainer: Trainer, model: nn.Module, config: HiFTConfig, *, momentum: float, make_base: Callable[[], Any]
    ) -> HiFT:
        """Wrap the Trainer's optimizer."""
        return HiFT.wrap(make_base(), model, config=config)

    def begin(self, optimizer: HiFT) -> None:
        """Freeze again what waits."""
        optimizer.reattach()

    def end(self, optimizer: HiFT) -> None:
        """Give every parameter its gradient back."""
        optimizer.detach()


class TrainerSFT(TrainerMethod):
    """SFT with the Trainer's learning rate and weight decay; by AdamW, with its betas and epsilon, too."""

    name = "SFT"

    def check(self, config: SFTConfig, training: TrainingArguments) -> None:
        """Refuse to bring back the best weights where their deltas are not saved, and to copy deltas to a reference."""
        check_best_model(training)
        check_synced_reference(training, "SFT's deltas are parameters that the reference does not have")

    def check_loss_weights(self, config: SFTConfig, names: Sequence[str]) -> None:
        """Refuse the default targets, which are the linear layers of the model's blocks."""
        if config.targets is None:
            raise ValueError(
                f"the loss has weights of its own ({', '.join(names)}), which SFT would leave as they are, since it "
                "trains the linear layers of the model's blocks; name them among what is trained, as in "
                f"SFTConfig(targets=[..., {names[0]!r}]), or train by HiFT, which trains all"
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
        """Hold the best model's deltas: without them its weights would count as pretrained ones."""
        load_state(optimizer, checkpoint)


_methods: dict[type, TrainerMethod] = {HiFTConfig: TrainerHiFT(), SFTConfig: TrainerSFT()}


def register_method(config_class: type, method: TrainerMethod) -> None:
    """Let `slivertune.attach` take the settings of a method of another package.

    Args:
        config_class: Class of its settings.
        method: How it trains under a Trainer.
    """
    _methods[config_class] = method


def method_of(setting: object) -> TrainerMethod | None:
    """The method whose settings these are; None for anything else."""
    return next((method for config_class, method in _methods.items() if isinstance(setting, config_class)), None)


def count_updates(trainer: Trainer) -> int:
    """Updates of a run, as the Trainer itself counts them when it starts.

    Args:
        trainer: With a training set of known length, or with `max_steps`.

    Returns:
        `max_steps` if that is set, else epochs times updates per epoch; what is left of an epoch's batches when they
        are grouped by `gradient_accumulation_steps` makes an update of its own.
    """
    arguments = trainer.args
    if arguments.max_steps >= 0:
        return arguments.max_steps
    updates_per_epoch = max(1, math.ceil(len(trainer.get_train_dataloader()) / arguments.gradient_accumulation_steps))
    return math.ceil(arguments.num_train_epochs * updates_per_epoch)
