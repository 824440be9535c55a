"""Hooks and stand-ins on a model, which a copy of it does not have, and handles that remove them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import nn


class ModuleHook:
    """A hook of a module. In a copy of the model, deep or pickled, it does nothing, since nothing trains the copy.

    Args:
        function: Function to call. None does nothing.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function with the arguments that torch passes to a hook."""
        return self.function(*args) if self.function is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ModuleHook, (None,))


class StandIn:
    """Stands in for a function of a model: a module's forward, a loss.

    A copy of the model, deep or pickled, has the function itself, without the stand-in.

    Args:
        function: The model's own function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def feature(self) -> Any:
        """Name of its feature in `refused_pairs`. None if it goes with every feature."""
        return None

    def kept_tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors on the device that this keeps in place of parameters."""
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.function, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.function,)


class ReadsWeight:
    """Base of an object whose method replaces a layer's forward, and reads a parked weight through its holder."""


def put_stand_in(module: nn.Module, name: str, stand_in: StandIn) -> Callable[[], None]:
    """Replace a module's method by a stand-in, on this instance alone.

    Args:
        module: The module.
        name: Name of the method.
        stand_in: Stand-in that is called in its place.

    Returns:
        Function that restores the method, unless something else has replaced the stand-in since.
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


def has_other_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is not its class's. A copy may have its class's as its own attribute."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class ModelHandle:
    """Removes from a model everything that a subclass has put on it. Also a context manager, which does so at its end.

    A handle belongs to one model and is neither copied nor pickled.
    """

    refusal_to_copy: ClassVar[str]
    """Text of the error of a copy, with the state of a copied model and the way out."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Have something else removed together with this.

        Args:
            undo: Function that `remove` calls, before it undoes any earlier change.
        """
        self._undo.append(undo)

    def remove(self) -> None:
        """Restore the model as it was. A second call does nothing."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()  # one that fails is tried again by the next call

    def __enter__(self) -> Self:
        """Return the handle itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove everything from the model."""
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse to copy the handle."""
        raise TypeError(self.refusal_to_copy)

    def __reduce__(self) -> Any:
        """Refuse to pickle the handle."""
        raise TypeError(self.refusal_to_copy)
