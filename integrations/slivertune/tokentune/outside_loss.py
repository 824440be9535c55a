"""Causal models whose loss is computed outside of them, from an output per token.

TRL gives a model a second head (`trl.trainer.utils.add_fused_lm_head`, trl 1.15). Called with `fused_lm_head=True`, it
returns the log-probability of each label and no logits, and the trainer computes the loss. Labels that are shifted
already are scored one by one on the given rows. So the selected rows go in with their own targets, and the output,
shape (batch, k), belongs to them.
"""

from typing import Any

import torch

FUSED_HEAD = "fused_lm_head"
"""Keyword by which TRL's trainers request log-probabilities."""


def refuse_unknown_loss(model: Any) -> None:
    """Refuse a forward for log-probabilities that go into an unknown loss.

    Args:
        model: Model that is called.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{type(model).__name__} was called with {FUSED_HEAD}=True, by a trainer of TRL that computes its loss from "
        "log-probabilities itself. Under SFTTrainer attach by slivertune.attach(trainer, TokenTune(...)), which scores "
        "the selected tokens. Train DPO, GRPO, KTO and the like without TokenTune: they need the log-probabilities of "
        "whole completions"
    )


def with_selected_labels(kwargs: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a call of the second head, for the selected rows.

    Args:
        kwargs: Arguments of the call.
        labels: Targets of the selected positions, shape (batch, k).

    Returns:
        Arguments with these labels, which the head does not shift.
    """
    return {**kwargs, "labels": None, "shift_labels": labels}


def describe_forward(model: Any) -> str:
    """Name, for messages, the code that has replaced a model's forward (empty if none has, or only wraps it)."""
    function = vars(model).get("forward")
    function = getattr(function, "__func__", function)
    if function is None or hasattr(function, "__wrapped__"):
        return ""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f" (in {function.__module__}.{name}, which replaced its forward)"
