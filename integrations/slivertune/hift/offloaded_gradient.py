"""A gradient that lies in host memory, and stands in `.grad` as any other.

It has the gradient's shape, dtype and device, and computes on the device. So whatever a script does to it is done: a
backward adds to it, `clip_grad_norm_` finds the true norm and scales it, zeroing zeroes it. Views of it, and operators
on many at once, are refused.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.torch_internals import arguments_of, multi_tensor_norm, tree_map
from slivertune.hift.gradient_placeholder import GradientPlaceholder

_aten = torch.ops.aten
_Factor = torch.Tensor | float


class GradientOwner(Protocol):
    """What copies gradients to the host; see `HostGradients`."""

    streams: CopyStreams
    adds_in_step: bool

    def offload(self, offloaded: "OffloadedGradient", values: torch.Tensor) -> None:
        """Let values on the device take the place of those on the host."""

    def accumulate(self, offloaded: "OffloadedGradient", gradient: torch.Tensor) -> None:
        """Add a gradient on the device to one on the host."""

    def store(self, host: torch.Tensor, values: torch.Tensor) -> Event:
        """Copy values of the device to a part of a place; when they have arrived."""


class OffloadedGradient(GradientPlaceholder):
    """A gradient that lies in host memory, in place of the one that autograd has made on the device.

    Args:
        gradient: What it stands for.
        host: Of the same shape and dtype; where it is to lie.
        owner: Copies it.
    """

    def __init__(self, gradient: torch.Tensor, host: torch.Tensor, owner: "GradientOwner") -> None:
        self._host: torch.Tensor | None = host
        self._owner = owner
        self.stored: Event = None
        """When it has arrived on the host."""
        self._factors: list[_Factor] = []
        """What it is to be multiplied by when it is used: clipping's coefficient."""
        self.norm_on_device: torch.Tensor | None = None
        """Its 2-norm, computed on the device before it left."""
        self.part_norms: list[torch.Tensor] = []
        """The 2-norms of the parts that were stepped."""
        self._arriving: torch.Tensor | None = None
        """What the last backward has added, which is still on the device: the step adds it, piece by piece."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor on the device."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary tensor."""
        return self.clone().__reduce_ex__(protocol)

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
                f"{func} on a gradient that waits in host memory (gradients='host') is not supported: "
                "it would bring many to the device at once, or give a view of what is not there; take a copy first "
                "(parameter.grad.clone()), or set gradients='device'"
            )
        copies: dict[int, torch.Tensor] = {}

        def on_device(value: Any) -> Any:
            if not isinstance(value, OffloadedGradient):
                return value
            return copies.setdefault(id(value), value.copy_on_device())

        out = func(*tree_map(on_device, args), **tree_map(on_device, kwargs))
        for position, (name, is_written) in enumerate(arguments_of(func)):
            value = args[position] if position < len(args) else kwargs.get(name)
            if is_written and isinstance(value, OffloadedGradient):
                value._replace(copies[id(value)])
        # Where an operator writes, torch returns the tensor that it was given, and not this copy of it.
        return out

    def copy_on_device(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of it flattened, or, by default, all of it in its shape; a copy on the device."""
        self._owner.streams.compute_after(self.stored)
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

    def complete_for_step(self, part: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
        """As `complete`, for a part that is stepped; keeps its norm, since the whole will never be on the device."""
        part = self.complete(part, start, stop)
        self.part_norms.append(norm_of(part))
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
        self.norm_on_device = None
        self.stored = self._owner.store(host.view(-1)[start:stop], values)

    def part_on_host(self, start: int, stop: int | None) -> torch.Tensor:
        """Elements [start, stop) of what lies on the host, flattened; with None for `stop` all of it in its shape."""
        return self._lying() if stop is None else self._lying().view(-1)[start:stop]

    def norm_of_two(self) -> torch.Tensor:
        """Its 2-norm, as `clip_grad_norm_` asks for it; a tensor without dimensions, on its device."""
        self._lying()
        if self.norm_on_device is None or self._factors or self._arriving is not None:
            return norm_of(self.copy_on_device())
        self._owner.streams.compute_after(self.stored)
        return self.norm_on_device.clone()

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


def _any_offloaded(values: Sequence[Any]) -> bool:
    return any(isinstance(each, OffloadedGradient) for each in values)


def norm_of(gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The 2-norm, by the kernel that `clip_grad_norm_` takes on the gradient's device."""
    if gradient.device.type != "cuda":
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, 2.0, out=out)
        return norm
    norm = multi_tensor_norm(gradient)
    return norm if out is None else out.copy_(norm)
