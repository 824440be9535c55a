"""Factories that a test or a plan may replace for a while, without a patch of the class."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Maker(Generic[P, T]):
    """Makes objects of one class, or objects that stand in for them.

    Args:
        default: Factory that is used unless it is replaced.
    """

    def __init__(self, default: Callable[P, T]) -> None:
        self._makers = [default]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a new object."""
        return self._makers[-1](*args, **kwargs)

    @contextmanager
    def replaced_by(self, maker: Callable[P, T]) -> Iterator[None]:
        """Replace the factory inside the block.

        Args:
            maker: Factory, called with the same arguments.
        """
        self._makers.append(maker)
        try:
            yield
        finally:
            self._makers.remove(maker)
