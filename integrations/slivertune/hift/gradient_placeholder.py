"""What stands in `.grad` in place of a gradient that is not on the device."""

from typing import Any

import torch

from slivertune.core.torch_internals import tensor_without_memory


class GradientPlaceholder(torch.Tensor):
    """A tensor with a gradient's shape, strides, dtype and device, and no memory of its own.

    Args:
        gradient: What it stands for.
        *others: A subclass's own.
    """

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, *others: Any) -> "GradientPlaceholder":
        """Make it without memory."""
        return tensor_without_memory(cls, gradient)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; there are no values to show."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Nothing of it lies on the device."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(*ignored: Any) -> torch.Tensor:
        """It can't be made of anything else."""
        raise NotImplementedError("a gradient that is not on the device can't be traced")
