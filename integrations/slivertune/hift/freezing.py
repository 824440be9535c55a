"""Which parameters may have a gradient now, and how backward is kept from going below them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Freezer:
    """Lets one group of parameters at a time have gradients.

    Args:
        model: Its forward gets a hook that keeps checkpointing from forcing gradients into the embedding.
        parameters: All that any group trains; frozen here until their turn.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._active: frozenset[int] = frozenset()
        self._is_released = False
        self._gradient_hooks: list[RemovableHandle] = []
        self._forward_hook = model.register_forward_pre_hook(_truncate_backward)
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def only(self, parameters: Sequence[nn.Parameter], on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Freeze all but these; `on_gradient` is called with each of them when its gradient is complete."""
        self._remove_gradient_hooks()
        self._active = frozenset(id(parameter) for parameter in parameters)
        for parameter in self._parameters:
            parameter.requires_grad_(id(parameter) in self._active)
            if id(parameter) not in self._active:
                parameter.grad = None
        self._gradient_hooks = [parameter.register_post_accumulate_grad_hook(on_gradient) for parameter in parameters]

    def settle(self) -> None:
        """Restore what others have frozen or unfrozen since: adapters that are switched on unfreeze all of theirs.

        Gradients that arrived where none belong are dropped, so that no norm counts them.
        """
        for parameter in self._parameters:
            if parameter.requires_grad != (id(parameter) in self._active):
                parameter.requires_grad_(id(parameter) in self._active)
                if id(parameter) not in self._active:
                    parameter.grad = None

    def release(self) -> None:
        """Let all parameters have gradients again, and take the hooks away; later calls do nothing."""
        if self._is_released:
            return
        self._is_released = True
        self._remove_gradient_hooks()
        self._forward_hook.remove()
        for parameter in self._parameters:
            parameter.requires_grad_(True)

    def _remove_gradient_hooks(self) -> None:
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []


def _truncate_backward(model: nn.Module, inputs: Any) -> None:
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
