"""The call of a hooked model in training: its arguments by name, its tokens, and what can't be asked of it."""

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slivertune.tokentune.head import HeadKind, Targets


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


class CallArguments:
    """Names the arguments of a model's calls, also after its forward was replaced by one that takes others."""

    def __init__(self, model: nn.Module) -> None:
        """Read the signature.

        Args:
            model: The model.
        """
        self._model = model
        self._forward = vars(model).get("forward")
        self._signatures = self._read()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
        """Bind the arguments of a call.

        Args:
            args: Arguments by position.
            kwargs: Arguments by name.

        Returns:
            Bound arguments. None if the forward does not take them.
        """
        forward = vars(self._model).get("forward")
        if forward is not self._forward:
            self._forward, self._signatures = forward, self._read()
        for signature in self._signatures:
            with suppress(TypeError):
                return signature.bind_partial(*args, **kwargs)
        return None

    def _read(self) -> list[inspect.Signature]:
        forward: Any = self._model.forward
        own, plain = inspect.signature(forward), inspect.signature(forward, follow_wrapped=False)
        if not any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in own.parameters.values()):
            return [own, plain]
        # A wrapper that passes everything on has no names for positions, and the class's forward does.
        function: Any = type(self._model).forward
        return [inspect.signature(function.__get__(self._model)), plain]


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


def find_tokens(kind: HeadKind, arguments: dict[str, Any]) -> torch.Tensor | None:
    """Find the ids or embeddings of a call, whose first dimensions are batch and padded length.

    Args:
        kind: Kind of the model's head.
        arguments: Arguments of the call.

    Returns:
        Tensor; None if only the layers will tell, as with pixels.

    Raises:
        ValueError: If they have other dimensions, or if a model that is scored by token gets none.
    """
    for name, num_dimensions, dimensions in (("input_ids", 2, ""), ("inputs_embeds", 3, ", hidden size")):
        tokens = arguments.get(name)
        if not isinstance(tokens, torch.Tensor):
            continue
        if tokens.dim() != num_dimensions:
            raise ValueError(
                f"{name} of shape {tuple(tokens.shape)} in a training forward: TokenTune selects from (batch, length"
                f"{dimensions}). If the model flattens it (multiple choice), attach to the part that gets it flat: "
                "TokenTune(..., always=(0, -1)).attach(model.base_model)"
            )
        return tokens
    if kind in ("causal", "token"):
        raise ValueError(
            "a training forward without input_ids= or inputs_embeds=, of which TokenTune selects. Pass one by its name"
        )
    return None


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
