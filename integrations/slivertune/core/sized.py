"""Functions whose memory and work follow from the sizes of their arguments, of which a memory plan runs each once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
Runner = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
"""Function that calls another with its positional arguments, or does what amounts to it."""
_runner: ContextVar[Runner | None] = ContextVar("_runner", default=None)  # another thread may train meanwhile


def sized(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Declare that a function only reads tensors, and that its memory and its result's size follow from their sizes.

    Args:
        function: Function that returns a new vector. Calls with keywords are run as they are.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        runner = _runner.get()
        if runner is None or kwargs:
            return function(*args, **kwargs)
        result: _R = runner(function, args)
        return result

    return call


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Let a runner call the functions that `sized` declares."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)
