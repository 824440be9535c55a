"""The place in host memory where the active group's gradients wait, and the copies that take them there."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import aligned, claimed_host_memory, tensor_at
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.offloaded_gradient import OffloadedGradient, norm_of
from slivertune.hift.piece import Weight


class HostGradients:
    """Owns the place in host memory where the active group's gradients wait.

    A gradient leaves on a side stream; of those that are leaving, the largest and at most `in_flight_bytes` of others
    stay on the device.

    Args:
        streams: Of the device where the gradients are made.
        in_flight_bytes: Bytes.
        num_bytes: Of the largest group's gradients; see `bytes_of`.
    """

    def __init__(self, streams: CopyStreams, in_flight_bytes: int, num_bytes: int) -> None:
        self.streams = streams
        """On which gradients leave."""
        self._in_flight_bytes = in_flight_bytes
        self._num_bytes = num_bytes
        self.adds_in_step = False
        """Whether the backward that runs is an update's last, and what it adds stays on the device for the step."""
        self._leaving: deque[tuple[Event, tuple[torch.Tensor, ...]]] = deque()
        self._room: torch.Tensor | None = None
        self._places: dict[nn.Parameter, int] = {}
        self._living: dict[nn.Parameter, OffloadedGradient] = {}
        self._free_after: Event = None
        """When the last step has read what lies in the room."""

    def begin_turn(self, weights: Sequence[Weight]) -> None:
        """Give the weights of the group whose turn it is their places; gradients of other weights are dropped."""
        if [id(weight.parameter) for weight in weights] == [id(parameter) for parameter in self._places]:
            return
        self.drop()
        self._places, start = {}, 0
        for weight in weights:
            self._places[weight.parameter] = start
            start += aligned(weight.parameter.nbytes)

    def take(self, parameter: nn.Parameter) -> None:
        """Let the gradient of a parameter, which has just been accumulated, leave."""
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, OffloadedGradient):
            return  # what was added to it has left already
        if gradient.is_sparse:
            raise ValueError(
                "a sparse gradient can't wait in host memory; set sparse=False on its embedding, or gradients='device'"
            )
        claim(gradient, "gradients")
        known = self._living.pop(parameter, None)
        if known is not None:
            known.close()
        offloaded = OffloadedGradient(gradient, self._place_of(parameter, gradient), self)
        self.offload(offloaded, gradient)
        self._living[parameter] = offloaded
        parameter.grad = offloaded

    def offload(self, offloaded: OffloadedGradient, values: torch.Tensor) -> None:
        """Let values on the device take the place of those on the host."""
        norm = self._new_norm(offloaded)
        with self.streams.on("outbound", self.streams.record(), self._free_after):
            offloaded.part_on_host(0, None).copy_(values, non_blocking=True)
            norm_of(values, norm)
            offloaded.stored = self.streams.record("outbound")
        self._keep_until(offloaded.stored, values, norm)

    def accumulate(self, offloaded: OffloadedGradient, gradient: torch.Tensor) -> None:
        """Add a gradient on the device to one on the host; the sum is the device's."""
        norm, host = self._new_norm(offloaded), offloaded.part_on_host(0, None)
        with claimed_at_birth("gradients"):
            total = torch.empty_like(gradient)
        claim(total, "gradients")
        made = self.streams.record()
        with self.streams.on("inbound", made, offloaded.stored):
            total.copy_(host, non_blocking=True)
            loaded = self.streams.record("inbound")
        with self.streams.on("outbound", made, loaded):
            total.add_(gradient)
            host.copy_(total, non_blocking=True)
            norm_of(total, norm)
            offloaded.stored = self.streams.record("outbound")
        self._keep_until(offloaded.stored, gradient, total, norm)

    def store(self, host: torch.Tensor, values: torch.Tensor) -> Event:
        """Copy values of the device to a part of a place; when they have arrived."""
        with self.streams.on("outbound", self.streams.record()):
            host.copy_(values, non_blocking=True)
            stored = self.streams.record("outbound")
        self._keep_until(stored, values)
        return stored

    def settle(self) -> None:
        """Let go of the gradients that were leaving: what is computed from now on comes after that."""
        while self._leaving:
            self._settle_first()

    def end_update(self) -> None:
        """Close all gradients of an update that was stepped, or given up."""
        self.adds_in_step = False
        self.drop()

    def drop(self) -> None:
        """Close all gradients that are known."""
        self.settle()
        # What reads their places is queued; what the next backward brings comes after that.
        self._free_after = self.streams.record()
        for parameter, offloaded in self._living.items():
            if parameter.grad is offloaded:
                parameter.grad = None
            offloaded.close()
        self._living.clear()

    def _place_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.nbytes > parameter.nbytes:
            raise ValueError(
                f"a gradient of {gradient.dtype} of a weight of {parameter.dtype} is larger than the weight, and its "
                "place in host memory is not; set gradients='device'"
            )
        if self._room is None:
            self._room = claimed_host_memory(self.streams, self._num_bytes, "gradients")
        return tensor_at(self._room, self._places[parameter], gradient)

    def _new_norm(self, offloaded: OffloadedGradient) -> torch.Tensor:
        """Where the norm is to lie: memory of the computing stream, which reads it."""
        offloaded.norm_on_device = torch.empty((), dtype=offloaded.dtype, device=offloaded.device)
        return offloaded.norm_on_device

    def _keep_until(self, left: Event, *tensors: torch.Tensor) -> None:
        """Keep tensors alive that a side stream reads, and let the computation wait where they become too many."""
        if left is None:
            return
        self._leaving.append((left, tensors))
        # One may be larger than all that is allowed; then a norm's, which comes right after it, need not wait for it.
        while self._bytes_beside_largest() > self._in_flight_bytes:
            self._settle_first()

    def _settle_first(self) -> None:
        self.streams.compute_after(self._leaving[0][0])
        self._leaving.popleft()

    def _bytes_beside_largest(self) -> int:
        sizes = [sum(each.nbytes for each in kept) for _, kept in self._leaving]
        return sum(sizes) - max(sizes, default=0)


def bytes_of(weights: Sequence[Weight]) -> int:
    """Bytes of host memory that the gradients of some weights take."""
    return sum(aligned(weight.parameter.nbytes) for weight in weights)
