"""Gradients that leave the device as soon as they are complete, and wait in host memory for their step.

What is left in `.grad` is an `OffloadedGradient`: it has the gradient's shape, dtype and device, lies on the host, and
computes on the device. So whatever a script does to it is done: a backward adds to it, `clip_grad_norm_` finds the true
norm and scales it, zeroing zeroes it. Views of it, and operators on many at once, are refused.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.torch_internals import tree_map
from slivertune.hift.offload_buffer import aligned, tensor_at
from slivertune.hift.piece import Weight

_aten = torch.ops.aten
_Factor = torch.Tensor | float


class OffloadedGradient(torch.Tensor):
    """A gradient that lies in host memory, in place of the one that autograd has made on the device.

    Args:
        gradient: What it stands for.
        host: Of the same shape and dtype; where it is to lie.
        owner: Copies it.
    """

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, host: torch.Tensor, owner: "HostGradients") -> "OffloadedGradient":
        """Make it without memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, strides=gradient.stride(), dtype=gradient.dtype, device=gradient.device
        )

    def __init__(self, gradient: torch.Tensor, host: torch.Tensor, owner: "HostGradients") -> None:
        self._host: torch.Tensor | None = host
        self._owner = owner
        self._stored: Event = None
        """When it has arrived on the host."""
        self._factors: list[_Factor] = []
        """What it is to be multiplied by when it is used: clipping's coefficient."""
        self._norm: torch.Tensor | None = None
        """Its 2-norm, computed on the device before it left."""
        self._arriving: torch.Tensor | None = None
        """What the last backward has added, which is still on the device: the step adds it, piece by piece."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; the values would have to be copied."""
        return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, in host memory)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor on the device."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary tensor."""
        return self.clone().__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Nothing of it lies on the device."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(*ignored: Any) -> torch.Tensor:
        """It can't be made of anything else."""
        raise NotImplementedError("a gradient in host memory can't be traced")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the device, on copies that go back to the host where it writes."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], OffloadedGradient) else None
        if own is not None and not kwargs and own._handle(func, args):
            return own
        if own is not None and func is _aten.linalg_vector_norm.default and own._has_norm(args[1:], kwargs):
            return own.norm_of_two()
        if func is _aten.detach.default:
            return own
        many = any(isinstance(each, (list, tuple)) and _any_offloaded(each) for each in args)
        if many or func.is_view:
            raise RuntimeError(
                f"{func} on a gradient that waits in host memory (gradients={GRADIENTS_ON_HOST!r}) is not supported: "
                "it would bring many to the device at once, or give a view of what is not there; take a copy first "
                "(parameter.grad.clone()), or set gradients='device'"
            )
        copies: dict[int, torch.Tensor] = {}

        def on_device(value: Any) -> Any:
            if not isinstance(value, OffloadedGradient):
                return value
            return copies.setdefault(id(value), value.copy_on_device())

        out = func(*tree_map(on_device, args), **tree_map(on_device, kwargs))
        if not func._schema.is_mutable:
            return out
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, OffloadedGradient) and argument.alias_info is not None:
                value._replace(copies[id(value)])
        return own if own is not None else out

    def copy_on_device(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of it flattened, or, by default, all of it in its shape; a copy on the device."""
        self._owner.streams.compute_after(self._stored)
        source = self.part_on_host(start, stop)
        copy = torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)
        return self.complete(copy, start, stop)

    def complete(self, part: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
        """Do to a part that was copied to the device what was not done to the whole, in place.

        Args:
            part: Elements [start, stop), flattened; or all of it in its shape.
            start: First element.
            stop: One past the last; None for all.
        """
        for factor in self._factors:
            part.mul_(factor)
        if self._arriving is not None:
            part.add_(self._arriving if part.shape == self.shape else self._arriving.view(-1)[start:stop])
        return part

    def write(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Replace elements [start, stop) of it, flattened.

        Args:
            start: First element.
            stop: One past the last.
            values: On the device, shape (stop - start,); factors are no longer applied to any.
        """
        host = self._lying()
        assert not self._factors, "a gradient is not clipped before the ranks have exchanged it"
        self._norm = None
        self._stored = self._owner.store(host.view(-1)[start:stop], values)

    def part_on_host(self, start: int, stop: int | None) -> torch.Tensor:
        """Elements [start, stop) of what lies on the host, flattened; with None for `stop` all of it in its shape."""
        return self._lying() if stop is None else self._lying().view(-1)[start:stop]

    @property
    def stored(self) -> Event:
        """When it has arrived on the host."""
        return self._stored

    def norm_of_two(self) -> torch.Tensor:
        """Its 2-norm, as `clip_grad_norm_` asks for it; a tensor without dimensions, on its device."""
        self._lying()
        if self._norm is None or self._factors or self._arriving is not None:
            return _norm(self.copy_on_device())
        self._owner.streams.compute_after(self._stored)
        return self._norm.clone()

    def close(self) -> None:
        """Let go of its place; later uses are errors."""
        self._host = self._arriving = None

    def _handle(self, func: Any, args: tuple[Any, ...]) -> bool:
        """What is done to gradients in every update, without bringing them back; whether this was such."""
        if func is _aten.add_.Tensor and len(args) == 2 and not isinstance(args[1], OffloadedGradient):
            if (
                args[1].shape != self.shape
                or args[1].dtype != self.dtype
                or self._factors
                or self._arriving is not None
            ):
                return False
            if self._owner.adds_in_step:
                self._arriving = args[1]
            else:
                self._owner.accumulate(self, args[1])
            return True
        if func in (_aten.mul_.Tensor, _aten.mul_.Scalar):
            factor = args[1]
            if self._arriving is not None or (isinstance(factor, torch.Tensor) and factor.dim()):
                return False
            self._factors.append(factor.clone() if isinstance(factor, torch.Tensor) else factor)
            return True
        return False

    def _has_norm(self, arguments: Sequence[Any], kwargs: Any) -> bool:
        return all(float(each) == 2.0 for each in arguments[:1]) and len(arguments) <= 1 and not kwargs

    def _replace(self, values: torch.Tensor) -> None:
        self._factors, self._arriving = [], None
        self._owner.offload(self, values)

    def _lying(self) -> torch.Tensor:
        if self._host is None:
            raise RuntimeError(
                "this gradient belongs to an update that is over, or was dropped; take a copy of it "
                "(parameter.grad.clone()) before step() if it is to be kept"
            )
        return self._host


GRADIENTS_ON_HOST = "host"
"""What the setting is called."""


def _any_offloaded(values: Sequence[Any]) -> bool:
    return any(isinstance(each, OffloadedGradient) for each in values)


def _norm(gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The 2-norm, by the kernel that `clip_grad_norm_` takes on the gradient's device."""
    if gradient.device.type != "cuda":
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, 2.0, out=out)
        return norm
    norm = torch._foreach_norm([gradient], 2.0)[0]
    return norm if out is None else out.copy_(norm)


class HostGradients:
    """Owns the place in host memory where the active group's gradients wait.

    A gradient leaves on a side stream; at most `in_flight_bytes` of gradients that are leaving stay on the device.

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
            offloaded._lying().copy_(values, non_blocking=True)
            _norm(values, norm)
            offloaded._stored = self.streams.record("outbound")
        self._keep_until(offloaded._stored, values)

    def accumulate(self, offloaded: OffloadedGradient, gradient: torch.Tensor) -> None:
        """Add a gradient on the device to one on the host; the sum is the device's."""
        norm, host = self._new_norm(offloaded), offloaded._lying()
        with claimed_at_birth("gradients"):
            total = torch.empty_like(gradient)
        claim(total, "gradients")
        made = self.streams.record()
        with self.streams.on("inbound", made, offloaded._stored):
            total.copy_(host, non_blocking=True)
            loaded = self.streams.record("inbound")
        with self.streams.on("outbound", made, loaded):
            total.add_(gradient)
            host.copy_(total, non_blocking=True)
            _norm(total, norm)
            offloaded._stored = self.streams.record("outbound")
        self._keep_until(offloaded._stored, gradient, total)

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
            with claimed_at_birth("gradients", "host"):
                self._room = self.streams.host_memory(self._num_bytes)
            claim(self._room, "gradients", "host")
        return tensor_at(self._room, self._places[parameter], gradient)

    def _new_norm(self, offloaded: OffloadedGradient) -> torch.Tensor:
        """Where the norm is to lie: memory of the computing stream, which reads it."""
        offloaded._norm = torch.empty((), dtype=offloaded.dtype, device=offloaded.device)
        return offloaded._norm

    def _keep_until(self, left: Event, *tensors: torch.Tensor) -> None:
        """Keep tensors alive that a side stream reads, and let the computation wait where they become too many."""
        if left is None:
            return
        self._leaving.append((left, tensors))
        # One may be larger than all that is allowed.
        while len(self._leaving) > 1 and self._bytes_leaving() > self._in_flight_bytes:
            self._settle_first()

    def _settle_first(self) -> None:
        self.streams.compute_after(self._leaving[0][0])
        self._leaving.popleft()

    def _bytes_leaving(self) -> int:
        return sum(each.nbytes for _, kept in self._leaving for each in kept)


def bytes_of(weights: Sequence[Weight]) -> int:
    """Bytes of host memory that the gradients of some weights take."""
    return sum(aligned(weight.parameter.nbytes) for weight in weights)
