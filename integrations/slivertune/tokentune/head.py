"""The arguments of a training forward, and the targets of the selected rows, which the model's head is scored on."""

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
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_TOKEN = ("ForMaskedLM", "ForTokenClassification")
_POOLED = ("ForSequenceClassification", "ForImageClassification")


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
    shifted = arguments.get("shift_labels")
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
        kwargs |= {"num_items_in_batch": num_items, "shift_labels": selected}
        loss: torch.Tensor = self.function(logits, selected, *args, **kwargs)
        return loss


def replace_loss(model: Any, targets: Callable[[], Targets | None]) -> Callable[[], None]:
    """Make a model score the selected positions by its own loss function.

    Args:
        model: A causal LM of transformers.
        targets: Function that returns the running forward's targets; None outside of training.

    Returns:
        Function that restores the model's loss function, unless other code has replaced it since.
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


@dataclass(slots=True)
class Call:
    """Arguments of a training forward, and facts about it."""

    arguments: dict[str, Any]
    """Arguments by name."""
    is_checkpointed: bool
    """Whether layers are recomputed in its backward."""
    is_scored_outside: bool = False
    """Whether a trainer computes the loss from the model's output (`fused_lm_head=True`)."""
    targets: Targets | None = None
    """Targets of its positions, if it has any."""


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return all arguments of a call by name, including those that only `**kwargs` takes.

    Args:
        bound: Bound arguments of the call.

    Returns:
        Arguments by name.
    """
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


def find_tokens(arguments: dict[str, Any]) -> torch.Tensor | None:
    """Find the ids or embeddings of a call, whose first dimensions are batch and padded length.

    Args:
        arguments: Arguments of the call.

    Returns:
        Tensor; None if only the layers will tell, as with pixels.
    """
    ids = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if ids is None else ids
    return tokens if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2 else None


def find_real(
    model: Any, head: HeadKind, arguments: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Find the tokens that are not padding.

    Args:
        model: Model that is called.
        head: Kind of its head.
        arguments: Arguments of the call.
        shape: Batch size and length.
        device: Device of the tokens.

    Returns:
        Mask, bool, shape (batch, length).
    """
    real = torch.ones(shape, dtype=torch.bool, device=device)
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == shape:
        real = mask.bool()
    ids, pad = arguments.get("input_ids"), getattr(model.config, "pad_token_id", None)
    if head == "pooled" and pad is not None and isinstance(ids, torch.Tensor) and tuple(ids.shape) == shape:
        # A causal classifier finds the last token that is not padding by its id, whatever the mask says.
        real = real & (ids != pad)
    return real


def check_call(model: Any, head: HeadKind, arguments: dict[str, Any], *, is_checkpointed: bool) -> None:
    """Refuse requests that a hooked model can't serve in training.

    Args:
        model: Model that is called.
        head: Kind of its head.
        arguments: Arguments of the call.
        is_checkpointed: Whether its layers are recomputed in the backward.

    Raises:
        ValueError: If the call requests an output that it can't give.
    """
    refused = {
        "output_attentions": "the attention of all tokens is not computed in one piece",
        "output_router_logits": "the routers see selected and other tokens apart, out of their order",
    }
    if head in ("causal", "token"):
        refused["output_hidden_states"] = "the last layer is not computed for tokens that are not selected"
    elif is_checkpointed:
        refused["output_hidden_states"] = "checkpointed layers could not tell which selection they were computed with"
    for name, reason in refused.items():
        asked = arguments.get(name)
        if getattr(model.config, name, False) if asked is None else asked:
            raise ValueError(f"{name}=True in a training forward under TokenTune: {reason}. Ask for it in evaluation")
    keep = arguments.get("logits_to_keep")
    if keep is not None and not (isinstance(keep, int) and keep == 0):
        raise ValueError(f"logits_to_keep={keep} in a training forward: TokenTune selects the logits. Leave it out")
    past = arguments.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError(
            "past_key_values in a training forward (prefix tuning, too): under TokenTune the keys are those of this "
            "batch's tokens alone. Leave them out"
        )
