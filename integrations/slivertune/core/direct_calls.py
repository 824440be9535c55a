"""Models whose `forward` is called directly, past torch's hooks: sentence-transformers (6.2), and PEFT before 0.21."""

from collections.abc import Callable
from typing import Any

from torch import nn

from slivertune.core.module_hook import StandIn, put_stand_in

_LIBRARIES = ("peft", "sentence_transformers")


def may_be_called_directly(model: nn.Module) -> bool:
    """Return whether a model holds a module of a library that calls the `forward` of transformers models."""
    return any(type(each).__module__.partition(".")[0] in _LIBRARIES for each in model.modules())


class CalledThroughHooks(StandIn):
    """Stands in for a model's forward. A direct call of it becomes a call of the model, with its hooks."""

    def __init__(self, model: nn.Module, in_forward: Callable[[], bool]) -> None:
        """Stand in for the forward.

        Args:
            model: The model.
            in_forward: Function that tells whether the hooks have run.
        """
        super().__init__(model.forward)
        self.__wrapped__ = model.forward  # for readers of the signature
        self.is_removed = False
        """Whether it passes every call on. Something else may still hold it."""
        self._model, self._in_forward = model, in_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, or the whole model if its hooks have not run."""
        forward = self.function if self.is_removed or self._in_forward() else self._model
        return forward(*args, **kwargs)


def call_through_hooks(model: nn.Module, in_forward: Callable[[], bool]) -> Callable[[], None]:
    """Let a model's hooks run even if its forward is called directly.

    Args:
        model: The model.
        in_forward: Function that tells whether the hooks have run.

    Returns:
        Function that gives the model its forward back, unless something else has replaced it since.
    """
    stand_in = CalledThroughHooks(model, in_forward)
    take_off = put_stand_in(model, "forward", stand_in)

    def undo() -> None:
        stand_in.is_removed = True
        take_off()

    return undo
