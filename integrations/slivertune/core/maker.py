"""Objects of which a test or a plan may make others for a while, without a patch of their class."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Maker(Generic[P, T]):
    """Makes objects of one class, or what stands in for them.

    Args:
        default: Makes them where nothing else is said.
    """

    def __init__(self, default: Callable[P, T]) -> None:
        self._makers = [default]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """A new object."""
        return self._makers[-1](*args, **kwargs)

    @contextmanager
    def replaced_by(self, maker: Callable[P, T]) -> Iterator[None]:
        """Let something else make what is made meanwhile.

        Args:
            maker: Called with the same arguments.
        """
        self._makers.append(maker)
        try:
            yield
        finally:
            self._makers.remove(maker)
