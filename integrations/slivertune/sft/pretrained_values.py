"""Where a tensor's pretrained values are read and written: in the whole tensor, or in ranks' shards of it."""

import torch

from slivertune.deltas.delta import read_flat, write_flat
from slivertune.sft.targets import Target


def bits_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Element by element, for two tensors of one floating-point dtype of 16 or 32 bits."""
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.view(bits) != right.view(bits)


class PretrainedValues:
    """Reads and writes entries of a tensor that lies whole in its module.

    `slivertune.parallel` has others for tensors in shards, whose methods are collectives.

    Args:
        target: The tensor; its module may be given another one at any time.
    """

    is_whole = True
    """Whether every rank holds the tensor."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @property
    def device(self) -> torch.device:
        """Where the tensor's gradients arrive, and so what is kept for it."""
        return self._target.parameter.device

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Copy entries, in the tensor's dtype.

        Args:
            indices: int32, sorted flat positions; the same on every rank.
        """
        return read_flat(self._target.parameter, indices)

    def differing(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Which entries have other bits than these values, of those that this rank holds. A local operation.

        Args:
            indices: int32, sorted flat positions, shape (n,).
            values: In the tensor's dtype, shape (n,).

        Returns:
            bool, shape (n,).
        """
        return bits_differ(read_flat(self._target.parameter, indices), values)

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries."""
        write_flat(self._target.parameter, indices, values)

    def whole(self) -> torch.Tensor:
        """The whole tensor, on every rank."""
        return self._target.parameter.detach()
