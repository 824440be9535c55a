"""Models whose `forward` others call, past the hooks of torch: sentence-transformers (6.2), and PEFT before 0.21."""

from collections.abc import Callable
from typing import Any

from torch import nn

from slivertune.core.module_hook import StandIn, put_stand_in

_LIBRARIES = ("peft", "sentence_transformers")


def may_be_called_directly(model: nn.Module) -> bool:
    """Whether a library whose modules call a transformers model by its `forward` has one in this model."""
    return any(type(each).__module__.partition(".")[0] in _LIBRARIES for each in model.modules())


class CalledThroughHooks(StandIn):
    """Stands in for a model's forward: where it is called directly, the model is, with its hooks."""

    def __init__(self, model: nn.Module, in_forward: Callable[[], bool]) -> None:
        """Stand in.

        Args:
            model: The model.
            in_forward: Tells whether its hooks have run.
        """
        super().__init__(model.forward)
        self.__wrapped__ = model.forward  # for who reads the signature
        self.is_removed = False
        """Whether it passes every call on; something else may still stand around it."""
        self._model, self._in_forward = model, in_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        forward = self.function if self.is_removed or self._in_forward() else self._model
        return forward(*args, **kwargs)


def call_through_hooks(model: nn.Module, in_forward: Callable[[], bool]) -> Callable[[], None]:
    """Let a model's hooks run also where its forward is called directly.

    Args:
        model: The model.
        in_forward: Tells whether they have run.

    Returns:
        Gives the model its forward back, unless something else has replaced it since.
    """
    stand_in = CalledThroughHooks(model, in_forward)
    take_off = put_stand_in(model, "forward", stand_in)

    def undo() -> None:
        stand_in.is_removed = True
        take_off()

    return undo
