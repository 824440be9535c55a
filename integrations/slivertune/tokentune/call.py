"""What a training forward was called with."""

import inspect
from typing import Any

import torch

from slivertune.tokentune.head import HeadKind, Targets


class Call:
    """One training forward."""

    def __init__(self, *, arguments: dict[str, Any], is_checkpointed: bool, targets: Targets | None = None) -> None:
        """Note it.

        Args:
            arguments: By name.
            is_checkpointed: Whether layers are computed again in its backward.
            targets: What its positions are scored on, if they are.
        """
        self.arguments, self.is_checkpointed, self.targets = arguments, is_checkpointed, targets
        tokens = _tokens(arguments)
        self.device = torch.device("cpu") if tokens is None else tokens.device


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments of a call by name, those that only `**kwargs` takes included.

    Args:
        bound: The call.

    Returns:
        The arguments.
    """
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


def tokens_shape(arguments: dict[str, Any]) -> tuple[int, int] | None:
    """Batch and padded length.

    Args:
        arguments: Of a call.

    Returns:
        Both; None where only the layers will tell, as with pixels.
    """
    tokens = _tokens(arguments)
    if tokens is None or tokens.dim() < 2:
        return None
    return tokens.shape[0], tokens.shape[1]


def find_real(
    model: Any, head: HeadKind, arguments: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Where tokens are no pads.

    Args:
        model: The model that is called.
        head: Its head.
        arguments: Of the call.
        shape: Batch and length.
        device: Where the tokens are.

    Returns:
        bool, shape (batch, length).
    """
    real = torch.ones(shape, dtype=torch.bool, device=device)
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == shape:
        real = mask.bool()
    ids, pad = arguments.get("input_ids"), getattr(model.config, "pad_token_id", None)
    if head == "pooled" and pad is not None and isinstance(ids, torch.Tensor) and tuple(ids.shape) == shape:
        # A causal classifier reads the last token that is no pad by its id, whatever the mask says.
        real = real & (ids != pad)
    return real


def check_call(model: Any, head: HeadKind, arguments: dict[str, Any], *, is_checkpointed: bool) -> None:
    """Refuse what a hooked model can't give in training.

    Args:
        model: The model that is called.
        head: Its head.
        arguments: Of the call.
        is_checkpointed: Whether its layers are computed again in the backward.

    Raises:
        ValueError: If something is asked for that it can't give.
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
            raise ValueError(f"{name}=True in a training forward under TokenTune: {reason}; ask for it in evaluation")
    keep = arguments.get("logits_to_keep")
    if keep is not None and not (isinstance(keep, int) and keep == 0):
        raise ValueError(f"logits_to_keep={keep} in a training forward: TokenTune decides which logits there are")
    past = arguments.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError(
            "past_key_values in a training forward (prefix tuning, too): under TokenTune the keys are those of this "
            "batch's tokens alone; leave them out"
        )


def _tokens(arguments: dict[str, Any]) -> torch.Tensor | None:
    ids = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if ids is None else ids
    return tokens if isinstance(tokens, torch.Tensor) else None
