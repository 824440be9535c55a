"""When a step needs whose weights: marks in a recorded schedule, at which copies of weights can be put in afterwards.

A mark is an event of the computing stream that nobody waits for, so that it takes no time by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from slivertune.core.outputs import tensors_of
from slivertune.core.torch_internals import NO_BACKWARD, at_end_of_backward, running_backward
from slivertune.planning.gathered_units import GatheredUnit

Kind = Literal["forward begins", "forward ends", "backward begins", "backward ends", "backward is over"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Of a unit in a step."""

    kind: Kind
    """`backward begins` before its first gradient is computed, and before it is recomputed; `backward ends` when the
    gradients of all its inputs are there, or, if none is to be, when the whole backward is over."""
    unit: int
    """Its place in the order of the forward; -1 for the whole model's."""
    gradient_bytes: int = 0
    """At its backward's end, of its gradients."""


class WeightMoments:
    """Marks them, on a model that is run.

    Args:
        units: Modules whose weights come together, in the order in which a forward runs them.
        mark: Marks the place in the schedule where it is called, for a moment.
    """

    def __init__(self, units: Sequence[GatheredUnit], mark: Callable[[Moment], None]) -> None:
        self._units, self._mark = units, mark
        self._in_backward: dict[int, None] = {}
        self._is_queued = False
        for index, unit in enumerate(units):
            first, last = unit.modules[0], unit.modules[-1]
            first.register_forward_pre_hook(partial(self._before, index), with_kwargs=True, prepend=True)
            last.register_forward_hook(partial(self._after, index))

    def _before(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if running_backward() != NO_BACKWARD:
            return None  # recomputed
        self._mark(Moment("forward begins", index))
        tensors = [each for each in tensors_of((args, kwargs)) if each.requires_grad]
        if not tensors:
            return None
        watch: Any = _AfterBackward.apply
        seen = dict(zip(map(id, tensors), watch(partial(self._end, index), *tensors), strict=True))
        return (
            tuple(seen.get(id(each), each) for each in args),
            {name: seen.get(id(each), each) for name, each in kwargs.items()},
        )

    def _after(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if running_backward() != NO_BACKWARD:
            return
        self._mark(Moment("forward ends", index))
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin, index))

    def _begin(self, index: int, gradient: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self._end_all)
        if index not in self._in_backward:
            self._in_backward[index] = None
            self._mark(Moment("backward begins", index))

    def _end(self, index: int) -> None:
        if index in self._in_backward:
            del self._in_backward[index]
            parameters = self._units[index].parameters
            self._mark(Moment("backward ends", index, sum(p.grad.nbytes for p in parameters if p.grad is not None)))

    def _end_all(self) -> None:
        for index in list(self._in_backward):
            self._end(index)
        self._is_queued = False
        self._mark(Moment("backward is over", -1))


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on, and says when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.tell = tell
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell()
        return (None, *gradients)
