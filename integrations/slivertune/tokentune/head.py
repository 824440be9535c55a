"""What a model's head gets and is scored on: the selected rows alone."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from slivertune.core.transformers_internals import forget_own_loss
from slivertune.tokentune.rows import Rows
from slivertune.tokentune.selection import shift_labels

HeadKind = Literal["causal", "token", "pooled", "other"]
"""Scored on the next token; on each token; on one output of the whole sequence; or not known, as a bare backbone."""

IGNORED = -100
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_TOKEN = ("ForMaskedLM", "ForTokenClassification")
_POOLED = ("ForSequenceClassification", "ForImageClassification")


def find_head_kind(model: nn.Module) -> HeadKind:
    """What kind of head a transformers model has, by the name of its class or of one that it is derived from.

    Args:
        model: The model.

    Returns:
        The kind.
    """
    kinds: list[tuple[HeadKind, tuple[str, ...]]] = [("causal", _CAUSAL), ("token", _TOKEN), ("pooled", _POOLED)]
    names = [each.__name__ for each in type(model).__mro__]
    return next((kind for name in names for kind, ends in kinds if any(end in name for end in ends)), "other")


@dataclass(slots=True)
class Targets:
    """What a forward's positions are scored on."""

    full: torch.Tensor
    """Targets of all positions, int64, shape (batch, length); `IGNORED` where there is none."""
    selected: torch.Tensor | None = None
    """Those of the selected ones, shape (batch, k), once they are drawn."""
    was_scored: bool = False
    """Whether the model has asked its loss function."""

    @property
    def is_labelled(self) -> torch.Tensor:
        """Where there is a target, bool, shape (batch, length)."""
        return self.full != IGNORED

    def select(self, rows: Rows) -> torch.Tensor:
        """Keep the targets of the selected positions.

        Args:
            rows: The selection.

        Returns:
            They, shape (batch, k).
        """
        self.selected = self.full.gather(1, rows.positions)
        return self.selected


def find_targets(kind: HeadKind, arguments: dict[str, Any], shape: tuple[int, int]) -> Targets | None:
    """What the positions of a call are scored on.

    Args:
        kind: The model's head.
        arguments: The call's arguments by name.
        shape: Batch and length.

    Returns:
        The targets; None for a model that is not scored by token.

    Raises:
        ValueError: If the model is scored by token and gets no labels, or labels of another shape; or if it gets labels
            by token and it is not known how it scores them.
    """
    labels = arguments.get("labels")
    if kind == "other" and isinstance(labels, torch.Tensor) and tuple(labels.shape) == shape:
        raise ValueError(
            "TokenTune does not know how this model scores a label for each token: its class is none of "
            f"{', '.join((*_CAUSAL, *_TOKEN))}; hook the part without the head, and score the selected tokens yourself"
        )
    if kind not in ("causal", "token"):
        return None
    if labels is None:
        raise ValueError(
            "TokenTune scores the selected tokens inside the model, and this training forward has no labels=; a loss "
            "that is computed outside (label smoothing, compute_loss_func) would score tokens that carry no gradient; "
            "pass labels to the model, or remove() the handle"
        )
    if tuple(labels.shape) != shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} don't match the tokens' {shape}; give one for each token"
        )
    if kind == "token":
        return Targets(labels)
    shifted = arguments.get("shift_labels")
    return Targets(shift_labels(labels) if shifted is None else shifted)


class ScaledLoss:
    """Stands in for a causal model's loss function: the mean over the selected positions that have a label.

    With `num_items_in_batch` N, the sum is divided by N x selected labels / all labels of this forward, so that it
    stays an estimate of the dense loss; by at least 1.
    """

    def __init__(self, function: Callable[..., torch.Tensor], targets: Callable[[], Targets | None]) -> None:
        """Wrap a loss function.

        Args:
            function: The model's own.
            targets: Tells what the running forward is scored on; None outside of training.
        """
        self.function, self.targets = function, targets

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., torch.Tensor]:
        """The model's own loss function: a copy of the model is not hooked."""
        return copy.deepcopy(self.function, memo)

    def __reduce__(self) -> Any:
        """The model's own loss function: a model that is read from a pickle is not hooked."""
        return _itself, (self.function,)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss.

        Args:
            logits: Of the selected positions, shape (batch, k, vocabulary); of all outside of training.
            labels: As the model was given them.
            *args: For the model's own function.
            **kwargs: For the model's own function.
        """
        targets = self.targets()
        if targets is None or targets.selected is None:
            return self.function(logits, labels, *args, **kwargs)
        targets.was_scored = True
        selected = targets.selected
        num_selected = (selected != IGNORED).sum()
        num_items = kwargs.pop("num_items_in_batch", None)
        if num_items is None:
            num_items = num_selected
        else:
            num_items = num_items * (num_selected / targets.is_labelled.sum().clamp(min=1))
        kwargs |= {"num_items_in_batch": num_items.clamp(min=1), "shift_labels": selected}
        return self.function(logits, selected, *args, **kwargs)


def _itself(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return function


def replace_loss(model: Any, targets: Callable[[], Targets | None]) -> Callable[[], None]:
    """Let a model score the selected positions by its own loss function.

    Args:
        model: A causal LM of transformers.
        targets: Tells the running forward's targets; None outside of training.

    Returns:
        Gives the model its loss function back, unless something else has replaced it since.
    """
    scaled = ScaledLoss(model.loss_function, targets)
    model.loss_function = scaled

    def undo() -> None:
        if model.loss_function is not scaled:
            return
        # Without an attribute of its own, the model has the loss of its class.
        forget_own_loss(model)
        if model.loss_function is not scaled.function:
            model.loss_function = scaled.function

    return undo


def zero_without_labels(loss: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The mean over no labels at all, which is not a number, as 0.

    Args:
        loss: A scalar.
        targets: What it scores.

    Returns:
        The loss, or 0; gradients are 0 then.
    """
    if targets.selected is None:
        return loss
    return torch.where((targets.selected != IGNORED).any(), loss, torch.zeros_like(loss))
