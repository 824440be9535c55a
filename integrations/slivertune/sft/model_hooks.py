"""What SFT puts on a model: hooks or layers on the trained tensors, and the deltas as parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slivertune.deltas.names import name_before
from slivertune.sft.config import PhiGradient
from slivertune.sft.delta_parameters import DELTA_PARAMETERS_NAME, DeltaParameters
from slivertune.sft.gradient_sync import GradientSync
from slivertune.sft.guard import ModelGuard
from slivertune.sft.linear import DeltaLayer
from slivertune.sft.weight import SparseWeight


class ModelHooks:
    """Hooks, layers and delta parameters, put on and taken off together.

    Args:
        model: The model.
        weights: The trained tensors.
        delta_parameters: Holds their deltas.
        gradient_sync: Is told of each gradient.
        phi_gradient: How the layer form computes gradients.
        guard: Looks after the model while it is attached.
    """

    layer_class = DeltaLayer
    """Adds the deltas in the layer form; planning, whose 4-bit weights are sizes alone, takes another."""

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[SparseWeight],
        delta_parameters: DeltaParameters,
        gradient_sync: GradientSync,
        phi_gradient: PhiGradient,
        guard: ModelGuard,
    ) -> None:
        self._model = model
        self._guard = guard
        self._weights = weights
        self._delta_parameters = delta_parameters
        self._gradient_sync = gradient_sync
        self._phi_gradient = phi_gradient
        self._was_trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self.is_on = False
        """Whether the model has it."""
        self._handles: list[RemovableHandle] = []
        self._layers: list[DeltaLayer] = []

    def put_on(self, *, with_delta_parameters: bool = True) -> None:
        """Freeze the model, and see to each trained tensor's gradient.

        Args:
            with_delta_parameters: Whether the deltas are to be parameters of the model.
        """
        self.is_on = True
        self._model.requires_grad_(False)
        for at, weight in enumerate(self._weights):
            if weight.merged:
                weight.target.parameter.requires_grad_(True)
                hook = self._gradient_hook(at)
                self._handles.append(weight.target.parameter.register_post_accumulate_grad_hook(hook))
            else:
                self._layers.append(self.layer_class(weight, at, self._gradient_sync, self._phi_gradient))
        if not self._gradient_sync.communicator.is_alone:
            self._handles += self._gradient_sync.watch(self._model)
        # On a layer, as a model that is a container would count it among its layers and call it.
        if with_delta_parameters:
            self._owner.add_module(DELTA_PARAMETERS_NAME, self._delta_parameters)
        self._guard.put_on(self)

    def take_off(self) -> None:
        """Leave the model without any of it, still frozen."""
        self._guard.take_off()
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.remove()
        self._handles, self._layers = [], []
        if hasattr(self._owner, DELTA_PARAMETERS_NAME):
            delattr(self._owner, DELTA_PARAMETERS_NAME)
        self.is_on = False

    def restore_requires_grad(self) -> None:
        """Let `requires_grad` be as it was before the first `put_on`."""
        for name, parameter in self._model.named_parameters():
            was_trainable = self._was_trainable.get(name_before(name, self._was_trainable))
            parameter.requires_grad_(parameter.requires_grad if was_trainable is None else was_trainable)

    @property
    def _owner(self) -> nn.Module:
        return self._weights[0].target.module

    def _gradient_hook(self, at: int) -> Callable[[torch.Tensor], None]:
        # A tensor's hooks lie where Python's garbage collector does not look: they must not hold the tensor.
        reference = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            hooks = reference()
            if hooks is not None and parameter.grad is not None:
                hooks._take(at, parameter.grad)
                parameter.grad = None

        return take

    def _take(self, at: int, gradient: torch.Tensor) -> None:
        weight = self._weights[at]
        serial = self._gradient_sync.begin()
        weight.take(gradient)
        self._gradient_sync.show(at, gradient.reshape(-1), 0, weight.indices, serial)
