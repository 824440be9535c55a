"""Pretrained values of tensors of which every rank holds some elements: SFT's access to them."""

from abc import abstractmethod

import torch
import torch.distributed as dist

from slivertune.parallel.consistency.heartbeat import guard
from slivertune.sft.targets import Target
from slivertune.sft.weight import PretrainedValues, bits_differ


class ShardedPretrainedValues(PretrainedValues):
    """Reads and writes entries of a tensor whose flattened elements are shared out in one run to each rank.

    Args:
        target: The tensor.
        device: Where its gradients arrive.
    """

    is_whole = False

    def __init__(self, target: Target, device: torch.device) -> None:
        super().__init__(target)
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where the tensor's gradients arrive."""
        return self._device

    @abstractmethod
    def own(self) -> tuple[torch.Tensor, int]:
        """This rank's elements, of which a write is seen, in one dimension; and the position of the first."""

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Copy entries, in the tensor's dtype. A collective of as many elements."""
        shard, first = self.own()
        part = _within(indices, first, shard.numel())
        values = torch.zeros(indices.numel(), dtype=shard.dtype, device=self._device)
        values[part] = shard.take(_offsets(indices[part], first, shard)).to(self._device)
        # Of each byte, one rank has the value and all others zero.
        with guard(f"reading entries of {self._target.name}"):
            dist.all_reduce(values.view(torch.uint8))
        return values

    def differing(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Which entries of this rank's have other bits than these values. A local operation."""
        shard, first = self.own()
        offsets = indices.long() - first
        is_own = (offsets >= 0) & (offsets < shard.numel())
        if not shard.numel():
            return is_own
        present = shard.take(offsets.clamp(0, shard.numel() - 1).to(shard.device)).to(values.device)
        return is_own & bits_differ(present, values)

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries, each on the rank that has it."""
        shard, first = self.own()
        part = _within(indices, first, shard.numel())
        with torch.no_grad():
            shard.put_(_offsets(indices[part], first, shard), values[part].to(shard.device))


def _within(indices: torch.Tensor, first: int, length: int) -> slice:
    bounds = torch.tensor([first, first + length], device=indices.device)
    start, stop = torch.searchsorted(indices.long(), bounds).tolist()
    return slice(start, stop)


def _offsets(indices: torch.Tensor, first: int, shard: torch.Tensor) -> torch.Tensor:
    return (indices.long() - first).to(shard.device)
