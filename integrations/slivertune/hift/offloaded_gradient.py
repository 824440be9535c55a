"""A gradient in host memory that stands in `.grad` as any other.

It has the gradient's shape, dtype and device, and computes on the device. Scripts can use it as usual: a backward adds
to it, `clip_grad_norm_` finds the true norm and scales it, zeroing zeroes it. Views of it, and operators on many
tensors at once, are refused.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from slivertune.core.copy_streams import Event
from slivertune.core.torch_internals import arguments_of, multi_tensor_norm, tree_map
from slivertune.hift.gradient_placeholder import GradientPlaceholder

if TYPE_CHECKING:
    from slivertune.hift.host_gradients import GradientMemory

_aten = torch.ops.aten
_Factor = torch.Tensor | float


class OffloadedGradient(GradientPlaceholder):
    """A gradient in host memory, in place of the one that autograd has made on the device.

    Args:
        gradient: Gradient that it stands for.
        host: Tensor of the same shape and dtype that is to store it.
        owner: Owner that copies it.
    """

    def __init__(self, gradient: torch.Tensor, host: torch.Tensor, owner: "GradientMemory") -> None:
        self._host: torch.Tensor | None = host
        self._owner = owner
        self.stored: Event = None
        """Event after which it is on the host."""
        self._factors: list[_Factor] = []
        """Factors to multiply it by when it is used: clipping's coefficients."""
        self.norm_on_device: torch.Tensor | None = None
        """2-norm, computed on the device before the copy to the host."""
        self.part_norms: list[torch.Tensor] = []
        """2-norms of the parts that were stepped."""
        self._arriving: torch.Tensor | None = None
        """Addition of the last backward, which is still on the device. The step adds it, chunk by chunk."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor on the device."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary tensor."""
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on copies on the device, and copy those that it writes back to the host."""
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
                f"{func} on a gradient in host memory (gradients='host') is not supported: it would load many to the "
                "device at once, or return a view of an absent tensor. Copy it first (parameter.grad.clone()), or set "
                "gradients='device'"
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
        # If an operator writes, torch returns the tensor that it was given, and not this copy of it.
        return out

    def copy_on_device(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Copy elements [start, stop), flattened, or by default all of it in its shape, to the device."""
        self._owner.streams.compute_after(self.stored)
        source = self.part_on_host(start, stop)
        copy = torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)
        return self.complete(copy, start, stop)

    def complete(self, part: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
        """Apply to a part on the device, in place, the changes that its values on the host lack.

        Args:
            part: Elements [start, stop), flattened, or all of it in its shape.
            start: First element.
            stop: One past the last element; None for all.
        """
        for factor in self._factors:
            part.mul_(factor)
        if self._arriving is not None:
            part.add_(self._arriving if part.shape == self.shape else self._arriving.view(-1)[start:stop])
        return part

    def write(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Replace elements [start, stop), flattened.

        Args:
            start: First element.
            stop: One past the last element.
            values: Values on the device, shape (stop - start,). No factors may be pending.
        """
        host = self._lying()
        assert not self._factors, "a gradient is not clipped before the ranks have exchanged it"
        self.norm_on_device = None
        self.stored = self._owner.store(host.view(-1)[start:stop], values)

    def part_on_host(self, start: int, stop: int | None) -> torch.Tensor:
        """Return elements [start, stop) of the host's values, flattened, or all in their shape if `stop` is None."""
        return self._lying() if stop is None else self._lying().view(-1)[start:stop]

    def norm_of_two(self) -> torch.Tensor:
        """Return the 2-norm for `clip_grad_norm_`, as a tensor without dimensions on the gradient's device."""
        self._lying()
        if self.norm_on_device is None or self._factors or self._arriving is not None:
            return norm_of(self.copy_on_device())
        self._owner.streams.compute_after(self.stored)
        return self.norm_on_device.clone()

    def close(self) -> None:
        """Release its host memory. Later uses are errors."""
        self._host = self._arriving = None

    def _handle(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Run an operator that every update uses without loading the gradient. Return whether it was one."""
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
                "this gradient belongs to a finished update, or was dropped. To keep it, copy it "
                "(parameter.grad.clone()) before step()"
            )
        return self._host


def _any_offloaded(values: Sequence[Any]) -> bool:
    return any(isinstance(each, OffloadedGradient) for each in values)


def norm_of(gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the 2-norm, by the kernel that `clip_grad_norm_` uses on the gradient's device."""
    if gradient.device.type != "cuda":
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, 2.0, out=out)
        return norm
    norm = multi_tensor_norm(gradient)
    return norm if out is None else out.copy_(norm)
