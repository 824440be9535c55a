"""An identity that tells when the backward of tensors without a gradient runs."""

from collections.abc import Callable
from typing import Any

import torch


class Anchor:
    """Leads tensors without a gradient through an identity, so that their backward runs, and tells of it.

    Args:
        tell: Function that is called when such a backward begins.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._scalar = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)

    def lead(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if it has a gradient or can't have one. Otherwise return its identity.

        Args:
            tensor: Any tensor.
        """
        can_have_one = (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()
        if tensor.requires_grad or not can_have_one:
            return tensor
        return _Identity.apply(tensor, self._scalar, self._tell)  # type: ignore[no-any-return, no-untyped-call]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scalar: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell()
        return None, None, None
