"""Codes that are offloaded to the host, and loaded with the rest of their block."""

from collections.abc import Callable, Iterator

import torch
from typing_extensions import override

from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.parked.block_codes import BlockCodes
from slivertune.parked.host_weights import HostWeights
from slivertune.parked.quantized_weight import QuantizedWeight


class StreamedCodes:
    """Codes of one weight in one flat tensor, its `data`, which `HostWeights` moves like that of a parameter.

    Args:
        weight: Quantised weight, whose codes are in `data` from now on.
        weights: Function that returns the owner of the offloaded blocks.
        block: Index of the weight's block there.
    """

    def __init__(self, weight: QuantizedWeight, weights: Callable[[], HostWeights], block: int) -> None:
        self._name = weight.name
        codes = self._codes = weight.codes()
        self._weights = weights
        self._block = block
        self._num_taken = 0
        self._starts: list[int] = []
        num_bytes = 0
        for tensor in codes.tensors():
            self._starts.append(num_bytes)
            num_bytes += aligned(tensor.nbytes)
        device = next(codes.tensors()).device
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False), claimed_at_birth("parameters"):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        claim(flat, "parameters")
        for tensor, start in zip(codes.tensors(), self._starts, strict=True):
            tensor_at(flat, start, tensor).copy_(tensor)
        self.data = flat
        weight.keep_codes(self.take, _CodesOf(self, 0))

    @property
    def data(self) -> torch.Tensor:
        """Memory of the codes, on the host or the device, uint8, one dimension."""
        return self._data

    @data.setter
    def data(self, flat: torch.Tensor) -> None:
        self._data = flat
        for tensor, start in zip(self._codes.tensors(), self._starts, strict=True):
            tensor.data = tensor_at(flat, start, tensor)

    def take(self, codes: BlockCodes) -> BlockCodes:
        """Replace the codes of the weight.

        Args:
            codes: New codes, on the device; copied.

        Returns:
            Codes that make the weight from them, on the host or the device.
        """
        self._weights().begin_writing(self._block)
        for own, new in zip(self._codes.tensors(), codes.tensors(), strict=True):
            own.copy_(new)
        self._num_taken += 1
        return _CodesOf(self, self._num_taken)

    def bring(self, number: int) -> BlockCodes:
        """Load the codes to the device, and return them.

        Args:
            number: Replacements of the codes before they were asked for.

        Raises:
            RuntimeError: If they have been replaced since.
        """
        if number != self._num_taken:
            raise RuntimeError(
                f"{self._name} was quantised again since this forward, and its codes were replaced on the host. Run "
                "the backward before the weights are stepped or loaded, or leave the blocks on the device"
            )
        try:
            weights = self._weights()
        except ReferenceError:
            raise RuntimeError(
                f"{self._name} was restored since this forward. Run the backward before remove() or detach()"
            ) from None
        weights.bring(self._block)
        return self._codes

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return all stored tensors, on the host or the device."""
        return self._codes.tensors()


class _CodesOf(BlockCodes):
    """Streamed codes as they are at one moment.

    Args:
        streamed: Owner of the codes.
        number: Replacements of the codes before that moment.
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
