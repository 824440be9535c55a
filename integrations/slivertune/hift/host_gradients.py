"""Gradients in host memory until the step (`gradients="host"`): the memory, and the copies that offload them."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import aligned, claimed_host_memory, tensor_at
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.chunk import Weight
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.gradient_routes import DeviceGradients, Steps
from slivertune.hift.offloaded_gradient import OffloadedGradient, norm_of


class HostGradients(DeviceGradients):
    """Gradients are offloaded as soon as they are complete, and stepped after the backward.

    Args:
        steps: Functions that it calls.
        max_norm: Largest norm, as in `DeviceGradients`.
        slots_of: Function that returns the slots of a device, with its copy streams.
        take_room: Function that raises if the host has no room for these bytes, to call before they get memory.
        in_flight_bytes: Bytes of gradients in flight beside the largest.
        num_bytes: Bytes of the most gradients that an update has; see `bytes_of`.
    """

    refusal_of_scaler = (
        "a GradScaler unscales all gradients at once, and gradients='host' keeps them in host memory. Train in bf16, "
        "or set gradients='device'"
    )

    def __init__(
        self,
        steps: Steps,
        max_norm: float | None,
        *,
        slots_of: Callable[[torch.device], DeviceSlots],
        take_room: Callable[[int], None],
        in_flight_bytes: int,
        num_bytes: int,
    ) -> None:
        super().__init__(steps, max_norm)
        self._slots_of = slots_of
        self._take_room = take_room
        self._in_flight_bytes = in_flight_bytes
        self._num_bytes = num_bytes
        self._memory: GradientMemory | None = None
        self.others: Sequence[Weight] = ()
        """Weights of other groups whose gradients are offloaded, too."""

    @property
    @override
    def host_bytes(self) -> int:
        return 0 if self._memory is None else self._num_bytes

    @override
    def on_gradient(self, parameter: torch.Tensor) -> None:
        self.take(parameter)
        self._turn.state.prefetch(in_backward=True)

    def take(self, parameter: torch.Tensor) -> None:
        """Offload the gradient of a parameter, which has just been accumulated."""
        assert isinstance(parameter, nn.Parameter)
        weights = (*self._turn.state.weights, *self.others)
        streams = self._slots_of(weights[0].device).streams
        if self._memory is None or self._memory.streams is not streams:
            self._take_room(self._num_bytes)
            self._memory = GradientMemory(streams, self._in_flight_bytes, self._num_bytes)
        self._memory.begin_turn(weights)
        self._memory.take(parameter)

    def load_for_step(self) -> None:
        """Begin an update's last backward, which steps: load gradients of earlier ones with their chunks."""
        if self._memory is not None:
            self._memory.adds_in_step = True
            self._turn.state.load_gradients()

    @override
    def end(self) -> None:
        if self._memory is not None:
            self._memory.end_update()

    @override
    def drop(self, weights: Sequence[Weight]) -> None:
        super().drop(weights)
        if self._memory is not None:
            self._memory.end_update()


class GradientMemory:
    """Owner of the host memory for an update's gradients.

    A side stream offloads each gradient. The largest in flight, and at most `in_flight_bytes` of others, stay on
    the device.

    Args:
        streams: Copy streams of the device that computes the gradients.
        in_flight_bytes: Bytes of gradients in flight beside the largest.
        num_bytes: As in `HostGradients`.
    """

    def __init__(self, streams: CopyStreams, in_flight_bytes: int, num_bytes: int) -> None:
        self.streams = streams
        """Streams that offload gradients."""
        self._in_flight_bytes = in_flight_bytes
        self._num_bytes = num_bytes
        self.adds_in_step = False
        """Whether the running backward is an update's last, so that its additions stay on the device for the step."""
        self._leaving: deque[tuple[Event, tuple[torch.Tensor, ...]]] = deque()
        self._room: torch.Tensor | None = None
        self._places: dict[nn.Parameter, int] = {}
        self._living: dict[nn.Parameter, OffloadedGradient] = {}

    def begin_turn(self, weights: Sequence[Weight]) -> None:
        """Assign host memory to the gradients of the active group, and drop the gradients of other weights."""
        if [id(weight.parameter) for weight in weights] == [id(parameter) for parameter in self._places]:
            return
        self.drop()
        self._places, start = {}, 0
        for weight in weights:
            self._places[weight.parameter] = start
            start += aligned(weight.parameter.nbytes)

    def take(self, parameter: nn.Parameter) -> None:
        """Offload the gradient of a parameter, which has just been accumulated."""
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, OffloadedGradient):
            return  # additions to it are offloaded already
        if gradient.is_sparse:
            raise ValueError(
                "a sparse gradient can't be offloaded. Set sparse=False on its embedding, or gradients='device'"
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
        """Replace the values on the host with values on the device."""
        norm = self._new_norm(offloaded)
        # The computation, or this stream, has waited for every read of the host memory.
        with self.streams.on("outbound", self.streams.record()):
            offloaded.part_on_host(0, None).copy_(values, non_blocking=True)
            norm_of(values, norm)
            offloaded.stored = self.streams.record("outbound")
        self._keep_until(offloaded.stored, values, norm)

    def accumulate(self, offloaded: OffloadedGradient, gradient: torch.Tensor) -> None:
        """Add a gradient on the device to one on the host, and compute the sum on the device."""
        norm, host = self._new_norm(offloaded), offloaded.part_on_host(0, None)
        with claimed_at_birth("gradients"):
            total = torch.empty_like(gradient)
        claim(total, "gradients")
        with self.streams.on("inbound", self.streams.record(), offloaded.stored):
            total.copy_(host, non_blocking=True)
            loaded = self.streams.record("inbound")
        with self.streams.on("outbound", loaded):
            total.add_(gradient)
            host.copy_(total, non_blocking=True)
            norm_of(total, norm)
            offloaded.stored = self.streams.record("outbound")
        self._keep_until(offloaded.stored, gradient, total, norm)

    def store(self, host: torch.Tensor, values: torch.Tensor) -> Event:
        """Copy values from the device to a part of the host memory, and return the event of their arrival."""
        with self.streams.on("outbound", self.streams.record()):
            host.copy_(values, non_blocking=True)
            stored = self.streams.record("outbound")
        self._keep_until(stored, values)
        return stored

    def settle(self) -> None:
        """Release the gradients in flight, and make later computation wait for their copies."""
        while self._leaving:
            self._settle_first()

    def end_update(self) -> None:
        """Close all gradients of an update that was stepped, or given up."""
        self.adds_in_step = False
        self.drop()

    def drop(self) -> None:
        """Close all known gradients."""
        self.settle()
        for parameter, offloaded in self._living.items():
            if parameter.grad is offloaded:
                parameter.grad = None
            offloaded.close()
        self._living.clear()

    def _place_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.nbytes > parameter.nbytes:
            raise ValueError(
                f"a gradient of {gradient.dtype} of a weight of {parameter.dtype} is larger than the weight and than "
                "its place in host memory. Set gradients='device'"
            )
        if self._room is None:
            self._room = claimed_host_memory(self.streams, self._num_bytes, "gradients")
        return tensor_at(self._room, self._places[parameter], gradient)

    def _new_norm(self, offloaded: OffloadedGradient) -> torch.Tensor:
        """Allocate the norm in memory of the computing stream, which reads it."""
        offloaded.norm_on_device = torch.empty((), dtype=offloaded.dtype, device=offloaded.device)
        return offloaded.norm_on_device

    def _keep_until(self, left: Event, *tensors: torch.Tensor) -> None:
        """Keep tensors alive that a side stream reads. If they are too many, let the computation wait."""
        if left is None:
            return
        self._leaving.append((left, tensors))
        # One may exceed the limit alone. The small gradient of a norm right after it then need not wait.
        while self._bytes_beside_largest() > self._in_flight_bytes:
            self._settle_first()

    def _settle_first(self) -> None:
        self.streams.compute_after(self._leaving[0][0])
        self._leaving.popleft()

    def _bytes_beside_largest(self) -> int:
        sizes = [sum(each.nbytes for each in kept) for _, kept in self._leaving]
        return sum(sizes) - max(sizes, default=0)


def bytes_of(weights: Sequence[Weight]) -> int:
    """Return the bytes of host memory that the gradients of some weights take."""
    return sum(aligned(weight.parameter.nbytes) for weight in weights)
