"""Where a tensor's pretrained values are read and written: in the whole tensor, or in ranks' shards of it."""

from __future__ import annotations

import torch

from slivertune.sft.delta import read_flat, write_flat
from slivertune.sft.targets import Target


class BaseAccess:
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

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries."""
        write_flat(self._target.parameter, indices, values)

    def whole(self) -> torch.Tensor:
        """The whole tensor, on every rank."""
        return self._target.parameter.detach()
