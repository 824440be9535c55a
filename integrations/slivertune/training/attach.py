"""Put a method under a stock Trainer, which keeps its loop, its schedule and its checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from slivertune.hift import HiFT, HiFTConfig


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
