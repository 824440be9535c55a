"""Whether a backward ran since the last step, and whether it reached the group whose turn it is.

With one group free, a batch may not touch it at all: an unused pooler, a layer that LayerDrop left out, the tower of an
input that this batch does not have. Then nothing that the model returns requires a gradient, and `loss.backward()`
would raise. So tensors that the outermost call of the model returns without a gradient are led through an *anchor*, an
identity whose backward only tells that it ran. Tensors that require a gradient stay as they are, and get a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.core.layers import Layer
from slivertune.core.module_hook import ModuleHook
from slivertune.core.outputs import tensors_of, with_tensors_replaced
from slivertune.core.torch_internals import at_end_of_backward, running_backward


class BackwardWatch:
    """Watches the backward passes of one model; `release` ends it.

    Args:
        model: The model.
        layers: Its layers; modules that hold a whole one and more are called by themselves at times
            (`get_text_features`), so they are watched too wherever theirs is the outermost call.
        on_forward: Called before each outermost forward that records a graph.
        on_backward: Called when the backward of an outermost forward begins, before anything is recomputed. What it
            does at the end of the backward comes before this looks for gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        *,
        on_forward: Callable[[], None] = lambda: None,
        on_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_forward = on_forward
        self._on_backward = on_backward
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._ran = False
        self._reached = False
        self._task = -1
        self._is_scaled = False
        self._witness: nn.Parameter | None = None
        self._outermost: nn.Module | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._handles: list[RemovableHandle] = []
        for module in entry_modules(model, layers):
            self._handles += [
                module.register_forward_pre_hook(ModuleHook(self._before_forward)),
                module.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
            ]
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                # Inside of the model's forward, where accelerate has switched autocast on.
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._note_autocast)))
                break

    @property
    def missed(self) -> bool:
        """Whether a backward ran since the last step, and none reached the group."""
        return self._ran and not self._reached

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin the turn of these parameters."""
        self._parameters = tuple(parameters)
        self.forget()

    def note_gradient(self) -> None:
        """A gradient has arrived at the group."""
        self._reached = True

    def forget(self) -> None:
        """A step is over, or its gradients are given up."""
        self._ran = self._reached = False
        self._drop_witness()

    def release(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._outermost = None
        self.forget()
        self._parameters = ()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._outermost is not None:
            return
        self._outermost = module
        if not torch.is_grad_enabled():
            return
        self._note_autocast(module, inputs)
        self._drop_witness()
        if self._reached and all(parameter.grad is None for parameter in self._parameters):
            self.forget()
        self._on_forward()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._outermost is not module:
            return None
        self._outermost = None
        if output is None or not torch.is_grad_enabled():
            return None
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_backward)
        anchored = with_tensors_replaced(output, self._anchored)
        return None if anchored is output else anchored

    def _anchored(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        made: torch.Tensor = _Anchor.apply(tensor, self._anchor, self._begin_backward)  # type: ignore[no-untyped-call]
        return made

    def _begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        task = running_backward()
        if task != self._task:
            self._task = task
            self._on_backward()
            # Called when the whole backward is over, unless it has failed.
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._ran = True
        if self._is_scaled:
            self._place_witness()

    def _note_autocast(self, module: nn.Module, inputs: Any) -> None:
        device = self._parameters[0].device.type if self._parameters else "cpu"
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            self._is_scaled = True

    def _place_witness(self) -> None:
        """Give a GradScaler, which fails where no gradient is, one to look at: zeros, of the smallest parameter."""
        if self.missed and self._witness is None and all(parameter.grad is None for parameter in self._parameters):
            self._witness = min(self._parameters, key=lambda parameter: parameter.numel())
            self._witness.grad = torch.zeros_like(self._witness)

    def _drop_witness(self) -> None:
        if self._witness is not None:
            self._witness.grad = None
            self._witness = None


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
