"""Activation checkpointing by the name that the installed transformers has for it.

Gradient checkpointing until transformers 5.22, activation checkpointing from 5.23 on, which warns of the older name.
"""

from collections.abc import Mapping
from typing import Any


def enable_checkpointing(model: Any, options: Mapping[str, Any] | None = None) -> None:
    """Let a model of transformers compute its blocks again in the backward.

    Args:
        model: The model, or a PEFT model around one.
        options: For `torch.utils.checkpoint.checkpoint`; `use_reentrant=False` where there are none.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(None if options is None else dict(options))


def disable_checkpointing(model: Any) -> None:
    """Let a model of transformers keep its activations again.

    Args:
        model: The model, or a PEFT model around one.
    """
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
