"""The head of a model, and the targets of the selected rows, which it is scored on."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from slivertune.chunked_loss.function import IGNORED
from slivertune.core.module_hook import StandIn
from slivertune.core.transformers_internals import forget_own_loss
from slivertune.tokentune.rows import Rows
from slivertune.tokentune.selection import shift_labels

HeadKind = Literal["causal", "token", "pooled", "other"]
"""Kind of a head: scored on the next token, on each token, on one output per sequence, or unknown (a bare backbone)."""

NUM_ITEMS = "num_items_in_batch"
"""Argument of a forward with the number of labels in all forwards of an update."""
_SHIFTED = "shift_labels"
"""Argument of a causal model's loss function with the target of each position, not to be shifted any more."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_TOKEN = ("ForMaskedLM", "ForTokenClassification")
_POOLED = (
    "ForSequenceClassification",
    "ForNextSentencePrediction",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


def find_head_kind(model: nn.Module) -> HeadKind:
    """Find the kind of a transformers model's head, by the name of its class or of one that it is derived from.

    Args:
        model: The model.

    Returns:
        Kind of the head.
    """
    kinds: list[tuple[HeadKind, tuple[str, ...]]] = [("causal", _CAUSAL), ("token", _TOKEN), ("pooled", _POOLED)]
    names = [each.__name__ for each in type(model).__mro__]
    return next((kind for name in names for kind, ends in kinds if any(end in name for end in ends)), "other")


@dataclass(slots=True)
class Targets:
    """Targets of a forward's positions."""

    full: torch.Tensor
    """Targets of all positions, `IGNORED` for positions without one, int64, shape (batch, length)."""
    selected: torch.Tensor | None = None
    """Targets of the selected positions, shape (batch, k), once they are drawn."""
    was_scored: bool = False
    """Whether the model has called its loss function."""

    @property
    def is_labelled(self) -> torch.Tensor:
        """Mask of the positions with a target, bool, shape (batch, length)."""
        return self.full != IGNORED

    def select(self, rows: Rows) -> torch.Tensor:
        """Store the targets of the selected positions.

        Args:
            rows: The selection.

        Returns:
            Targets of the selected positions, shape (batch, k).
        """
        self.selected = self.full.gather(1, rows.positions)
        return self.selected

    def selected_items(self, num_items: Any) -> torch.Tensor:
        """Return the divisor of the sum over the selected positions.

        Args:
            num_items: Labels in all forwards of an update; None for those of this forward alone.

        Returns:
            Number of selected labels among them, if each forward had the share of this one; at least 1, a scalar.
        """
        assert self.selected is not None
        num_selected = (self.selected != IGNORED).sum()
        if num_items is None:
            return num_selected.clamp(min=1)
        return torch.clamp(num_items * (num_selected / self.is_labelled.sum().clamp(min=1)), min=1)


def find_targets(kind: HeadKind, arguments: dict[str, Any], shape: tuple[int, int]) -> Targets | None:
    """Find the targets of a call's positions.

    Args:
        kind: Kind of the model's head.
        arguments: Arguments of the call by name.
        shape: Batch size and length.

    Returns:
        Targets; None for a model that is not scored by token.

    Raises:
        ValueError: If the model is scored by token and gets no labels, or labels of another shape; or if it gets labels
            by token and their scoring is unknown.
    """
    labels = arguments.get("labels")
    if kind == "other" and isinstance(labels, torch.Tensor) and tuple(labels.shape) == shape:
        raise ValueError(
            "TokenTune does not know how this model scores a label per token: its class is none of "
            f"{', '.join((*_CAUSAL, *_TOKEN))}. Hook the part without the head, and score the selected tokens yourself"
        )
    if kind not in ("causal", "token"):
        return None
    if labels is None:
        raise ValueError(
            "TokenTune scores the selected tokens inside the model, and this training forward has no labels=. A loss "
            "computed outside (label smoothing, compute_loss_func, a trainer's own compute_loss) would score "
            "tokens that carry no gradient. Pass labels to the model, or call remove() on the handle"
        )
    if tuple(labels.shape) != shape:
        raise ValueError(f"labels of shape {tuple(labels.shape)} don't match the tokens' {shape}. Give one per token")
    if kind == "token":
        return Targets(labels)
    shifted = arguments.get(_SHIFTED)
    return Targets(shift_labels(labels) if shifted is None else shifted)


class ScaledLoss(StandIn):
    """Stands in for a causal model's loss function: the mean over the selected positions that have a label.

    With `num_items_in_batch` N, the sum is divided by N x selected labels / all labels of this forward, and by at least
    1. So it stays an estimate of the dense loss.
    """

    def __init__(self, function: Callable[..., torch.Tensor], targets: Callable[[], Targets | None]) -> None:
        """Wrap a loss function.

        Args:
            function: Loss function of the model.
            targets: Function that returns the running forward's targets; None outside of training.
        """
        super().__init__(function)
        self.targets = targets

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: Logits of the selected positions, shape (batch, k, vocabulary), or of all outside of training.
            labels: Labels, as the model got them.
            *args: Arguments of the model's own function.
            **kwargs: Arguments of the model's own function.
        """
        targets = self.targets()
        if targets is None or targets.selected is None:
            dense: torch.Tensor = self.function(logits, labels, *args, **kwargs)
            return dense
        targets.was_scored = True
        selected = targets.selected
        num_items = targets.selected_items(kwargs.pop(NUM_ITEMS, None))
        kwargs |= {NUM_ITEMS: num_items, _SHIFTED: selected}
        loss: torch.Tensor = self.function(logits, selected, *args, **kwargs)
        return loss


def replace_loss(model: Any, targets: Callable[[], Targets | None]) -> Callable[[], None]:
    """Make a model score the selected positions by its own loss function.

    Args:
        model: A causal LM of transformers.
        targets: Function that returns the running forward's targets; None outside of training.

    Returns:
        Function that restores the model's loss function, unless other code has replaced it since.

    Raises:
        ValueError: If the loss function takes no labels that are shifted already.
    """
    function = model.loss_function
    if _SHIFTED not in inspect.signature(function).parameters:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"the loss function {name} of {type(model).__name__} has no parameter {_SHIFTED}, so it shifts the labels "
            "itself. Under TokenTune it gets selected tokens, whose next ones are missing. Give it "
            f"{_SHIFTED}=None, and score logits[i] on {_SHIFTED}[i] where they are given"
        )
    scaled = ScaledLoss(function, targets)
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
    """Return the loss with 0 in place of the mean over no labels, which is NaN.

    Args:
        loss: Loss, a scalar.
        targets: Targets of the loss.

    Returns:
        Loss, or 0; gradients are 0 then.
    """
    if targets.selected is None:
        return loss
    return torch.where((targets.selected != IGNORED).any(), loss, torch.zeros_like(loss))
