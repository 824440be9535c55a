"""Put a method under a stock Trainer, which keeps its loop, its schedule and its checkpoints."""

from __future__ import annotations

import math
from typing import Any

from transformers import Trainer

from slivertune.hift import HiFT, HiFTConfig
from slivertune.sft import SFT, SFTConfig


def attach_hift(trainer: Trainer, config: HiFTConfig) -> HiFT:
    """Make HiFT the optimizer of a Trainer that has not trained yet.

    The Trainer itself builds the base optimizer from its arguments, with its own class, its own rule of what decays and
    its own exceptions; HiFT wraps that. The Trainer makes the schedule later, and sees a plain optimizer.

    Args:
        trainer: A Trainer without an optimizer, its model on the device where it trains.
        config: HiFT's settings.

    Returns:
        The optimizer, which has frozen all groups but the first.

    Raises:
        RuntimeError: If the Trainer has an optimizer already.
        ValueError: If the settings don't fit the model.
    """
    if trainer.optimizer is not None:
        raise RuntimeError("the Trainer has an optimizer already; give it none, and attach HiFT before it trains")
    model: Any = trainer.model
    optimizer = HiFT.wrap(trainer.create_optimizer(), model, config=config)
    trainer.optimizer = optimizer
    return optimizer


def attach_sft(trainer: Trainer, config: SFTConfig, *, momentum: float = 0.0) -> SFT:
    """Make SFT the optimizer of a Trainer that has not trained yet.

    Learning rate, weight decay and, where SFT trains by AdamW, its betas and epsilon are those of the Trainer's
    arguments. The Trainer clips: what it takes the norm of are the gradients of the trained weights.

    Args:
        trainer: A Trainer without an optimizer, its model on the device where it trains.
        config: SFT's settings.
        momentum: SM3's; with `selection="momentum"` alone.

    Returns:
        The optimizer, which has frozen all that it does not train.

    Raises:
        RuntimeError: If the Trainer has an optimizer already.
        ValueError: If the settings don't fit the model.
    """
    if trainer.optimizer is not None:
        raise RuntimeError("the Trainer has an optimizer already; give it none, and attach SFT before it trains")
    model: Any = trainer.model
    arguments = trainer.args
    adam: dict[str, Any] = {
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
    }
    optimizer = SFT(
        model,
        config=config,
        lr=arguments.learning_rate,
        total_steps=count_updates(trainer),
        weight_decay=arguments.weight_decay,
        momentum=momentum,
        **(adam if config.selection == "accumulated_gradient" else {}),
    )
    trainer.optimizer = optimizer
    return optimizer


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
    num_batches = len(trainer.get_train_dataloader())
    updates_per_epoch = max(1, math.ceil(num_batches / arguments.gradient_accumulation_steps))
    return math.ceil(arguments.num_train_epochs * updates_per_epoch)
