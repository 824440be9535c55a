"""The deltas as parameters of the model outside its state_dict, and a witness of changes to their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slivertune.core.torch_internals import version_of

DELTA_PARAMETERS_NAME = "slivertune_sft"
"""Name of the deltas' module in the first target's layer while SFT is attached."""

_WITNESS_GRADIENT = 2.0**-100
"""Gradient of the witness. Its square vanishes in an fp32 norm, and scaling it by any factor above 2^-26 is exact."""
_LARGEST_FACTOR = 2.0**26
"""Factor above which a change of the witness is no scaling: noise or a sign are many times its gradient."""


class DeltaParameters(nn.Module):
    """Shows the deltas (phi) to code that walks over `model.parameters()`: clipping, loss scaling, `model.zero_grad()`.

    Their `.grad` is the gradient of the trained weights only, so a norm over the model's parameters is the norm of the
    masked dense gradient. They keep their dtype when the model is cast. The model's `state_dict` and `load_state_dict`
    ignore them.

    Args:
        phis: Name and delta of each weight.
        device: First device of the witness.
    """

    def __init__(self, phis: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> None:
        super().__init__()
        for name, phi in phis:
            self.register_parameter(name.replace(".", "/"), phi)
        self.witness = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.serial = 0
        """Number of the running update."""
        self._version = 0
        self._idle: torch.Tensor | None = None
        """Zero gradient that `give_zero` set last."""

    def begin(self) -> int:
        """Record that a gradient arrives.

        Returns:
            Number of the gradient's update. It is a new one if the last update's gradients are gone, after `step` or
            because the training loop dropped them.
        """
        if self._is_gone():
            self.witness.grad = torch.full_like(self.witness, _WITNESS_GRADIENT)
            self._version = version_of(self.witness.grad)
            self.serial += 1
        return self.serial

    def _is_gone(self) -> bool:
        """Return whether the last update's gradients are gone. A loop may have zeroed them in place."""
        gradient = self.witness.grad
        if gradient is None or gradient is self._idle:
            return True
        if version_of(gradient) == self._version:
            return False  # without a wait for the device
        self._version = version_of(gradient)
        return not bool(gradient)

    def give_zero(self) -> None:
        """Set a zero gradient if there is none, since a GradScaler fails without any. No update begins."""
        if self.witness.grad is None:
            self.witness.grad = self._idle = torch.zeros_like(self.witness)

    @property
    def is_idle(self) -> bool:
        """Whether a backward has ended without reaching any delta, and no gradient has arrived since."""
        return self._idle is not None and self.witness.grad is self._idle

    def scale(self) -> torch.Tensor:
        """Return the factor that clipping or unscaling applied to all gradients since they arrived, an fp32 scalar.

        It is 1 if they were changed otherwise, such as by noise, which has no common factor.
        """
        gradient = self.witness.grad
        if gradient is None or self.is_idle:
            return torch.ones_like(self.witness)
        factor = gradient / _WITNESS_GRADIENT
        return torch.where((factor > 0) & (factor <= _LARGEST_FACTOR), factor, 1.0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeltaParameters:
        for parameter in self.parameters():
            if parameter.grad is self._idle:
                parameter.grad = None
            device = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device)).device
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
        return self
