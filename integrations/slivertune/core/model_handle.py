"""What was attached to a model, until it is removed."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self


class ModelHandle:
    """Takes off a model what a subclass puts on it; a context manager, which does so at its end.

    A handle belongs to one model and is neither copied nor pickled.
    """

    refusal_to_copy: ClassVar[str]
    """Text of the error of a copy: what a copy of the model is like, and what to do."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

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
