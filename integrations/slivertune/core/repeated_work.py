"""Operators that stand for several equal ones, so that a counter of work needs to see only one of them."""

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


def num_stood_for() -> int:
    """Return how many operators each operator stands for now."""
    return _numbers[-1] if _numbers else 1
