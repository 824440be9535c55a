"""The deltas as parameters of the model, out of its state_dict, and a witness of what is done to their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

DELTA_PARAMETERS_NAME = "slivertune_sft"
"""Their name among the modules of the first target's layer while SFT is attached."""

_WITNESS_GRADIENT = 2.0**-100
"""Its square vanishes in an fp32 norm, and scaling it by any factor above 2^-26 is exact."""


class DeltaParameters(nn.Module):
    """Shows the deltas (phi) to whatever walks over `model.parameters()`: clipping, loss scaling, `model.zero_grad()`.

    Their `.grad` is the gradient of the trained weights and of nothing else, so a norm over the model's parameters is
    the norm of the masked dense gradient. They stay fp32 when the model is cast, and neither `state_dict` nor
    `load_state_dict` of the model knows them.

    Args:
        phis: Each weight's name and delta.
        device: Where the witness lies first.
    """

    def __init__(self, phis: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> None:
        super().__init__()
        for name, phi in phis:
            self.register_parameter(name.replace(".", "/"), phi)
        self.witness = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.serial = 0
        """The number of the running update."""
        self._idle: torch.Tensor | None = None
        """The zero that `give_zero` has given last."""

    def begin(self) -> int:
        """Note that a gradient arrives.

        Returns:
            The number of the update that it belongs to: a new one when the last one's gradients are gone, by `step` or
            because the training loop dropped them.
        """
        if self.witness.grad is None or self.witness.grad is self._idle:
            self.witness.grad = torch.full_like(self.witness, _WITNESS_GRADIENT)
            self.serial += 1
        return self.serial

    def give_zero(self) -> None:
        """Give a GradScaler, which fails where no gradient is, a zero. No update begins."""
        if self.witness.grad is None:
            self.witness.grad = self._idle = torch.zeros_like(self.witness)

    def scale(self) -> torch.Tensor:
        """What all gradients were multiplied by since they arrived (clipping, unscaling); fp32, no dimensions."""
        gradient = self.witness.grad
        if gradient is None or gradient is self._idle:
            return torch.ones_like(self.witness)
        return gradient / _WITNESS_GRADIENT

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
