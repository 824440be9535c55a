"""An identity that tells when the backward of tensors without a gradient runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def anchor(tell: Callable[[], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that leads tensors without a gradient through an identity, so that their backward runs.

    Tensors that have a gradient, or can't have one, are returned as they are.

    Args:
        tell: Function that is called when such a backward begins.
    """
    return partial(_lead, torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True), tell)


def _lead(scalar: torch.Tensor, tell: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
    can_have_one = (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()
    if tensor.requires_grad or not can_have_one:
        return tensor
    return _Identity.apply(tensor, scalar, tell)  # type: ignore[no-any-return, no-untyped-call]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scalar: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell()
        return None, None, None
