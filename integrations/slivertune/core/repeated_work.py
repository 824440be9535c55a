"""Work that a memory plan runs once or twice in place of many times: equal parts of a loop, and operators on tiles."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from slivertune.core.torch_internals import FakeTensor

_numbers: list[int] = []
_repeats: list[int] = []
_planning: list[None] = []


@contextmanager
def standing_for(number: int) -> Iterator[None]:
    """Tell counters that each operator inside stands for so many, itself included. The innermost number counts.

    Args:
        number: Number of operators.
    """
    _numbers.append(number)
    try:
        yield
    finally:
        _numbers.pop()


@contextmanager
def running_different_parts() -> Iterator[None]:
    """Let `different` leave out parts of loops over tensors without data inside this context."""
    _planning.append(None)
    try:
        yield
    finally:
        _planning.pop()


def different(parts: Iterable[slice], tensor: torch.Tensor) -> Iterator[slice]:
    """Yield the parts of a loop whose memory and work follow from a part's size.

    In a plan only some are yielded: of equal parts the first, and then the second, which finds what the first has left
    and stands for all others.

    Args:
        parts: Parts, the equal ones one after the other.
        tensor: Tensor that the loop reads. Whoever trains beside a plan, in another thread, has tensors with data.
    """
    if not _planning or type(tensor) is not FakeTensor or torch.compiler.is_compiling():
        yield from parts
        return
    of_size: dict[int, list[slice]] = {}
    for part in parts:
        of_size.setdefault(part.stop - part.start, []).append(part)
    for first, *others in of_size.values():
        yield first
        if others:
            _repeats.append(len(others) * num_repeats())
            try:
                yield others[0]
            finally:
                _repeats.pop()


def num_repeats() -> int:
    """Return how many times the running part of a loop counts."""
    return _repeats[-1] if _repeats else 1


def num_stood_for() -> int | None:
    """Return how many operators each operator stands for now, None if each is counted by itself."""
    return _numbers[-1] if _numbers else None
