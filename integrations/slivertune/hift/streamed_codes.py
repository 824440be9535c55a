"""Codes that wait on the host, and come to the device with what else their block holds."""

from collections.abc import Callable, Iterator

import torch
from typing_extensions import override

from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.block_codes import BlockCodes
from slivertune.hift.host_weights import HostWeights
from slivertune.hift.waiting_weight import WaitingWeight


class StreamedCodes:
    """The codes of one weight in one flat tensor, its `data`, which `HostWeights` moves as it moves a parameter's.

    Args:
        waiting: Holds the weight, whose codes lie in `data` from now on.
        weights: Gives what moves them.
        block: The block's index there.
    """

    def __init__(self, waiting: WaitingWeight, weights: Callable[[], HostWeights], block: int) -> None:
        self._name = waiting.name
        codes = self._codes = waiting.codes()
        self._weights = weights
        self._block = block
        self._num_taken = 0
        self._starts: list[int] = []
        num_bytes = 0
        for tensor in codes.tensors():
            self._starts.append(num_bytes)
            num_bytes += aligned(tensor.nbytes)
        device = next(codes.tensors()).device
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False), claimed_at_birth("parameters"):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        claim(flat, "parameters")
        for tensor, start in zip(codes.tensors(), self._starts, strict=True):
            tensor_at(flat, start, tensor).copy_(tensor)
        self.data = flat
        waiting.keep_codes(self.take, _CodesOf(self, 0))

    @property
    def data(self) -> torch.Tensor:
        """Where the codes lie; uint8, one dimension."""
        return self._data

    @data.setter
    def data(self, flat: torch.Tensor) -> None:
        self._data = flat
        for tensor, start in zip(self._codes.tensors(), self._starts, strict=True):
            tensor.data = tensor_at(flat, start, tensor)

    def take(self, codes: BlockCodes) -> BlockCodes:
        """Hold other codes of the weight from now on.

        Args:
            codes: On the device; copied.

        Returns:
            What makes the weight of them, wherever they lie by then.
        """
        self._weights().begin_writing(self._block)
        for own, new in zip(self._codes.tensors(), codes.tensors(), strict=True):
            own.copy_(new)
        self._num_taken += 1
        return _CodesOf(self, self._num_taken)

    def bring(self, number: int) -> BlockCodes:
        """The codes, on the device.

        Args:
            number: How many others had been taken when they were asked for.

        Raises:
            RuntimeError: If others have been taken since.
        """
        if number != self._num_taken:
            raise RuntimeError(
                f"{self._name} was quantised anew since this forward, whose codes are gone with weights='host'; run "
                "the backward before the weights are stepped or loaded, or set weights='device'"
            )
        self._weights().bring(self._block)
        return self._codes

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept, where it lies."""
        return self._codes.tensors()


class _CodesOf(BlockCodes):
    """The codes that streamed ones are at a moment.

    Args:
        streamed: Has them.
        number: How many others it had taken before.
    """

    def __init__(self, streamed: StreamedCodes, number: int) -> None:
        self._streamed = streamed
        self._number = number

    @override
    def dense(self) -> torch.Tensor:
        return self._streamed.bring(self._number).dense()

    @override
    def tensors(self) -> Iterator[torch.Tensor]:
        return self._streamed.tensors()
