"""Hooks on a module that do nothing in a copy of it, deep or pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
