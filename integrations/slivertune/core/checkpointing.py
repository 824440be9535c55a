"""Activation checkpointing by the name that the installed transformers has for it.

The name is gradient checkpointing up to transformers 5.22. From 5.23 on, the older name causes a warning.
"""

from collections.abc import Mapping
from typing import Any


def enable_checkpointing(model: Any, options: Mapping[str, Any] | None = None) -> None:
    """Let a transformers model compute its blocks again in the backward.

    Args:
        model: The model, or a PEFT model around one.
        options: Arguments of `torch.utils.checkpoint.checkpoint`. None means `use_reentrant=False`.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(None if options is None else dict(options))


def disable_checkpointing(model: Any) -> None:
    """Let a transformers model keep its activations again.

    Args:
        model: The model, or a PEFT model around one.
    """
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
