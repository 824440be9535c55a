"""What hangs on a model: hooks and stand-ins that a copy does not have, and handles that take them off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import nn


class ModuleHook:
    """A hook of a module; in a copy of the model, deep or pickled, it does nothing: nothing trains the copy.

    Args:
        function: What to call; None does nothing.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function with what torch passes to a hook."""
        return self.function(*args) if self.function is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ModuleHook, (None,))


class StandIn:
    """Stands in for a function of a model: a module's forward, a loss.

    A copy of the model, deep or pickled, has the function itself: it is not hooked.

    Args:
        function: The model's own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def feature(self) -> Any:
        """Name of the feature in `refused_pairs` that it is a part of; None if that goes with everything."""
        return None

    def kept_tensors(self) -> Iterable[torch.Tensor]:
        """Tensors on the device that this keeps in place of parameters."""
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.function, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.function,)


def put_stand_in(module: nn.Module, name: str, stand_in: StandIn) -> Callable[[], None]:
    """Let a stand-in take the place of a module's method, on this instance alone.

    Args:
        module: The module.
        name: Of the method.
        stand_in: What is called in its place.

    Returns:
        Gives the module back what it had, unless something else has taken the place since.
    """
    had_own, before = name in vars(module), vars(module).get(name)
    setattr(module, name, stand_in)

    def take_off() -> None:
        if vars(module).get(name) is not stand_in:
            return
        if had_own:
            setattr(module, name, before)
        else:
            delattr(module, name)

    return take_off


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class ModelHandle:
    """Takes off a model what a subclass puts on it; a context manager, which does so at its end.

    A handle belongs to one model and is neither copied nor pickled.
    """

    refusal_to_copy: ClassVar[str]
    """Text of the error of a copy: what a copy of the model is like, and what to do."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Have something else taken off together with this.

        Args:
            undo: Called by `remove`, before what was put on earlier is taken off.
        """
        self._undo.append(undo)

    def remove(self) -> None:
        """Take it off the model, which is then as it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        """The handle itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it off."""
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A handle is not copied."""
        raise TypeError(self.refusal_to_copy)

    def __reduce__(self) -> Any:
        """A handle is not pickled."""
        raise TypeError(self.refusal_to_copy)
