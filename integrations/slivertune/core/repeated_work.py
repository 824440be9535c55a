"""Operators on a tile that stand for those on all tiles, so that a counter of work needs to see only one of them."""

from collections.abc import Iterator
from contextlib import contextmanager

_numbers: list[int] = []


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


def num_stood_for() -> int | None:
    """Return how many operators each operator stands for now, None if each is counted by itself."""
    return _numbers[-1] if _numbers else None
