"""Work that a memory plan runs a few times in place of many: equal parts of a loop, and operators on tiles."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar

import torch

from slivertune.core.torch_internals import FakeTensor, apply_function

_planning: list[None] = []


class _Counts(threading.local):
    """Numbers that counters read, of one thread: another may train, or plan, at the same time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Numbers of operators that one stands for. The last counts."""
        self.repeats: list[int] = []
        """Times that the running part of each loop counts."""
        self.in_backward = 1
        """Times that the tile counts whose backward runs."""


_counts = _Counts()
_FEWEST_TILES = 5
_FEWEST_EQUAL = 5
T = TypeVar("T")


@contextmanager
def standing_for(number: int) -> Iterator[None]:
    """Tell counters that each operator inside stands for so many, itself included. The innermost number counts.

    Args:
        number: Number of operators.
    """
    _counts.numbers.append(number)
    try:
        yield
    finally:
        _counts.numbers.pop()


@contextmanager
def running_different_parts() -> Iterator[None]:
    """Let equal parts of loops over tensors without data be left out inside this context."""
    _planning.append(None)
    _counts.in_backward = 1
    try:
        yield
    finally:
        _planning.pop()
        _counts.in_backward = 1


def different(parts: Iterable[slice], tensor: torch.Tensor) -> Iterator[slice]:
    """Yield the parts of a loop whose memory and work follow from a part's size.

    In a plan only some are yielded: of equal parts the first, and then the second, which finds what the first has left
    and stands for all others.

    Args:
        parts: Parts, the equal ones one after the other.
        tensor: Tensor that the loop reads. Whoever trains beside a plan, in another thread, has tensors with data.
    """
    if not _may_leave_out(tensor):
        yield from parts
        return
    of_size: dict[int, list[slice]] = {}
    for part in parts:
        of_size.setdefault(part.stop - part.start, []).append(part)
    for first, *others in of_size.values():
        yield first
        if others:
            with repeating(len(others)):
                yield others[0]


def few_of_equal(
    items: Sequence[T], form: Callable[[T], Hashable], tensor: torch.Tensor
) -> list[tuple[T, Sequence[T]]]:
    """Return the items to work on, one after the other, each with items that it stands for.

    In a plan most of many equal items in a row are left out: the first three and the last one stay, since work on an
    item may begin during that on the one before, and the second stands for the others. Work on it is done in
    `repeating`.

    Args:
        items: Items, in the order of the work.
        form: Function that returns what an item's memory and work follow from. None if it is like no other.
        tensor: Tensor that the work reads. Whoever trains beside a plan, in another thread, has tensors with data.

    Returns:
        Items that stay, in order, each with those left out.
    """
    if not _may_leave_out(tensor):
        return [(each, ()) for each in items]
    found: list[tuple[T, Sequence[T]]] = []
    for of_form, run in groupby(items, form):
        equal = list(run)
        if of_form is None or len(equal) < _FEWEST_EQUAL:
            found += [(each, ()) for each in equal]
        else:
            found += [(equal[0], ()), (equal[1], equal[3:-1]), (equal[2], ()), (equal[-1], ())]
    return found


def over_tiles(function: Callable[..., Any], tensors: Sequence[torch.Tensor], length: int, dim: int) -> list[Any]:
    """Call a function on each tile of some tensors.

    In a plan most of equal tiles are left out, in the backward, too: the first and the last of them run, and the second
    stands for the others. Their outputs, and the gradients of their inputs, have their memory.

    Args:
        function: Function of one tile of each tensor, whose memory and work follow from the tiles' sizes. It returns a
            tensor with as many rows.
        tensors: Tensors, of one length in the dimension that is cut.
        length: Length of a tile.
        dim: Dimension to cut.

    Returns:
        Outputs, in order; only the first if it is no tensor.
    """
    num_equal, rest = divmod(tensors[0].shape[dim], length)
    if num_equal < _FEWEST_TILES or not _may_leave_out(tensors[0]):
        return [function(*tile) for tile in zip(*(each.split(length, dim) for each in tensors), strict=True)]
    sizes = [length, length, (num_equal - 3) * length, length, *([rest] if rest else [])]
    first, second, others, *last = zip(*(each.split(sizes, dim) for each in tensors), strict=True)
    output = function(*first)
    if not isinstance(output, torch.Tensor):
        return [output]
    outputs = [_counted(output, 1)]
    with repeating(num_equal - 2):
        model = function(*second)
    shape = list(model.shape)
    shape[dim] = sizes[2]
    outputs += [_counted(model, num_equal - 2), apply_function(_LeftOut, model.detach(), shape, *others)]
    return outputs + [_counted(function(*tile), 1) for tile in last]


def _may_leave_out(tensor: torch.Tensor) -> bool:
    return bool(_planning) and type(tensor) is FakeTensor and not torch.compiler.is_compiling()


@contextmanager
def repeating(number: int) -> Iterator[None]:
    """Tell counters that the part of a loop that runs inside is one of so many.

    Args:
        number: Number of parts, this one included.
    """
    _counts.repeats.append(number * num_repeats())
    try:
        yield
    finally:
        _counts.repeats.pop()


def _counted(output: torch.Tensor, number: int) -> torch.Tensor:
    """Let the backward of a tile count so many times, from the gradient of its output on."""
    counted: torch.Tensor = apply_function(_Counted, output, number)
    return counted


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _counts.in_backward = ctx.number
        return gradient, None


class _LeftOut(torch.autograd.Function):
    """Memory of the outputs of tiles that are left out, and of the gradients of their inputs."""

    @staticmethod
    def forward(ctx: Any, model: torch.Tensor, shape: list[int], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.forms = [(each.shape, each.dtype) for each in inputs]
        return model.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed = zip(ctx.forms, ctx.needs_input_grad[2:], strict=True)
        made = [gradient.new_empty(shape, dtype=dtype) if is_needed else None for (shape, dtype), is_needed in needed]
        return None, None, *made


def num_repeats() -> int:
    """Return how many times the running part of a loop counts."""
    return (_counts.repeats[-1] if _counts.repeats else 1) * _counts.in_backward


def num_stood_for() -> int | None:
    """Return how many operators each operator stands for now, None if each is counted by itself."""
    return _counts.numbers[-1] if _counts.numbers else None
