"""Stand-ins in `.grad` for gradients that are not on the device."""

from typing import Any

import torch

from slivertune.core.torch_internals import tensor_without_memory


class GradientPlaceholder(torch.Tensor):
    """A tensor with a gradient's shape, strides, dtype and device, without memory of its own.

    Args:
        gradient: Gradient that it stands for.
        *others: Arguments of a subclass.
    """

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, *others: Any) -> "GradientPlaceholder":
        """Create the tensor without memory."""
        return tensor_without_memory(cls, gradient)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape and dtype, since there are no values to show."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return no tensors, since none is on the device."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(*ignored: Any) -> torch.Tensor:
        """Refuse, since it can't be built from anything else."""
        raise NotImplementedError("a gradient that is not on the device can't be traced")
