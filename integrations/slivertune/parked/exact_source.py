"""Storage of exact weights on the host, while the device holds something else in their place."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import claimed_host_memory, tensor_at

StreamsOf = Callable[[torch.device], CopyStreams]
"""Function that returns the copy streams of a device."""


class ExactSource(ABC):
    """Storage of one exact weight, on the host."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the exact weight in its own dtype, on the host, for reading only, before the next step."""

    @abstractmethod
    def write(self, weight: torch.Tensor) -> None:
        """Copy values that were written to the weight into this storage, and wait for the copy.

        Args:
            weight: Exact weight, on any device.
        """

    @abstractmethod
    def load(self, into: torch.Tensor) -> Event:
        """Queue the copy of the exact weight to the device.

        Args:
            into: Tensor to copy to.

        Returns:
            Event after which it has arrived.
        """

    @abstractmethod
    def end_loading(self) -> None:
        """Note that the computing stream waits for the copy that `load` has queued."""

    @abstractmethod
    def store(self, weight: torch.Tensor) -> Event:
        """Queue the copy of a trained weight to the host, unless it is there already.

        Args:
            weight: Weight on the device. Its memory must not be written before the copy is complete.

        Returns:
            Event after which the copy is complete.
        """


class HostCopy(ExactSource):
    """A weight without a master, offloaded in its own dtype. One that is not trained is only read.

    Args:
        exact: Exact weight, which is copied.
        device: Device on which it computes.
        streams_of: Function that returns the copy streams of a device.
    """

    def __init__(self, exact: torch.Tensor, device: torch.device, streams_of: StreamsOf) -> None:
        self._streams_of = streams_of
        self._device = device
        self._copy = self._like(exact)
        self._copy.copy_(exact)
        self._stored: Event = None

    @override
    def read(self) -> torch.Tensor:
        self._streams.synchronize()
        return self._copy

    @override
    def write(self, weight: torch.Tensor) -> None:
        self._streams.synchronize()
        self._copy.copy_(weight.detach())

    @override
    def load(self, into: torch.Tensor) -> Event:
        self._follow(into.device)
        streams = self._streams
        with streams.on("inbound", streams.record(), self._stored):
            into.copy_(self._copy, non_blocking=True)
            return streams.record("inbound")

    @override
    def end_loading(self) -> None:
        """Do nothing: no memory of the device was taken beside the weight."""

    @override
    def store(self, weight: torch.Tensor) -> Event:
        self._follow(weight.device)
        streams = self._streams
        with streams.on("outbound", streams.record()):
            self._copy.copy_(weight, non_blocking=True)
            self._stored = streams.record("outbound")
        return self._stored

    @property
    def _streams(self) -> CopyStreams:
        return self._streams_of(self._device)

    def _follow(self, device: torch.device) -> None:
        """Move the copy along if the model has moved: its memory is right for one device only."""
        if device != self._device:
            before = self.read()
            self._device, self._stored = device, None
            self._copy = self._like(before)
            self._copy.copy_(before)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor_at(claimed_host_memory(self._streams, tensor.nbytes, "parameters"), 0, tensor)
