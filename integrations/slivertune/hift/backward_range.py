"""How far a backward runs: where a model may be entered, where its outputs get an anchor, where it stops below."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slivertune.core.layers import Layer


def entry_modules(model: nn.Module, layers: Iterable[Layer]) -> list[nn.Module]:
    """The model, and the modules in it that hold a whole layer and more: what a training loop may call by itself.

    Args:
        model: The model.
        layers: Its layers, none without parameters.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    first_of: dict[str, frozenset[str]] = {
        layer.parameter_names[0]: frozenset(layer.parameter_names) for layer in layers
    }
    found = [model]
    for module in model.modules():
        if module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        own = {name_of[id(parameter)] for parameter in module.parameters()}
        if any(first in own and len(own) > len(names) and names <= own for first, names in first_of.items()):
            found.append(module)
    return found


def lead_through_anchor(tensor: torch.Tensor, anchor: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
    """A tensor whose backward tells that it ran; the tensor itself if it has a gradient, or can't have one.

    Args:
        tensor: An output of the model.
        anchor: Requires a gradient.
        tell: Called in the backward.
    """
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    made: torch.Tensor = _Anchor.apply(tensor, anchor, tell)  # type: ignore[no-untyped-call]
    return made


class _Anchor(torch.autograd.Function):
    """The identity on a tensor without a gradient, whose backward tells that it ran."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell()
        return None, None, None


def truncate_backward(model: nn.Module, inputs: Any) -> None:
    """Undo `enable_input_require_grads`, which transformers 5 calls along with checkpointing.

    With the embedding's output requiring a gradient, backward would run through every frozen block down to it.
    Reentrant checkpointing needs it that way, so there it stays.
    """
    for module in model.modules():
        if getattr(module, "_require_grads_hooks", None) and not _is_reentrant(module):
            module.disable_input_require_grads()  # type: ignore[operator]


def _is_reentrant(model: nn.Module) -> bool:
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            return getattr(function, "keywords", {}).get("use_reentrant") is not False
    return False
