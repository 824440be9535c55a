"""Causal models whose loss is taken outside of them, from what comes out for each token.

TRL gives a model a second head (`trl.trainer.utils.add_fused_lm_head`, trl 1.15): called with `fused_lm_head=True`, it
returns the log-probability of each label and no logits, and the trainer makes the loss. Labels that are shifted already
are scored one by one on the rows that there are. So the selected rows go in with their own targets, and what comes out,
of shape (batch, k), is theirs.
"""

from typing import Any

import torch

FUSED_HEAD = "fused_lm_head"
"""The keyword by which TRL's trainers ask for log-probabilities."""


def refuse_unknown_loss(model: Any) -> None:
    """Refuse a forward for log-probabilities of which nobody has said what loss they make.

    Args:
        model: The model that is called.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{type(model).__name__} was called with {FUSED_HEAD}=True, by a trainer of TRL that makes its loss of the "
        "log-probabilities itself. Under SFTTrainer attach by slivertune.attach(trainer, TokenTune(...)), which scores "
        "the selected tokens; DPO, GRPO, KTO and their like need the log-probabilities of whole completions: train "
        "them without TokenTune"
    )


def with_selected_labels(kwargs: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    """A call of the second head, for the selected rows.

    Args:
        kwargs: Its arguments.
        labels: Targets of the selected positions, shape (batch, k).

    Returns:
        Its arguments with these labels, which it does not shift.
    """
    return {**kwargs, "labels": None, "shift_labels": labels}


def describe_forward(model: Any) -> str:
    """Who has put another forward in the place of a model's, for messages; empty if nobody did, or only around it."""
    function = vars(model).get("forward")
    function = getattr(function, "__func__", function)
    if function is None or hasattr(function, "__wrapped__"):
        return ""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f" (in {function.__module__}.{name}, which took the place of its forward)"
