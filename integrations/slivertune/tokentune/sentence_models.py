"""Transformers models inside of sentence-transformers' (6.2), which call `model.forward`, past the hooks of torch."""

from collections.abc import Callable
from typing import Any

from torch import nn

from slivertune.core.module_hook import StandIn
from slivertune.tokentune.rows import SelectionContext

_READS_ALL = frozenset(("mean", "max", "mean_sqrt_len_tokens", "weightedmean"))
"""Ways of pooling that read every token."""


def is_sentence_model(model: nn.Module) -> bool:
    """Whether a model is one of sentence-transformers, or holds one."""
    return any(_is_of_sentence_transformers(each) for each in model.modules())


def pools_single_tokens(model: nn.Module) -> bool:
    """Whether sentences are what single tokens have become, the first or the last.

    Args:
        model: A model of sentence-transformers, or any other.
    """
    modes = [getattr(each, "pooling_mode", None) for each in model.modules() if _is_of_sentence_transformers(each)]
    known = [(mode,) if isinstance(mode, str) else tuple(mode) for mode in modes if mode is not None]
    return any(not _READS_ALL.issuperset(each) for each in known)


def _is_of_sentence_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "sentence_transformers"


class CalledThroughHooks(StandIn):
    """Stands in for a model's forward: where it is called directly, the model is, with its hooks."""

    def __init__(self, model: nn.Module, selection: SelectionContext) -> None:
        """Stand in.

        Args:
            model: The model.
            selection: Tells whether its hooks have run.
        """
        super().__init__(model.forward)
        self.__wrapped__ = model.forward  # for who reads the signature
        self._model, self._selection = model, selection

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        forward = self.function if self._selection.in_forward else self._model
        return forward(*args, **kwargs)


def call_through_hooks(model: nn.Module, selection: SelectionContext) -> Callable[[], None]:
    """Let a model's hooks run also where its forward is called directly.

    Args:
        model: The model.
        selection: Tells whether they have run.

    Returns:
        Gives the model its forward back, unless something else has replaced it since.
    """
    was_own, stand_in = "forward" in vars(model), CalledThroughHooks(model, selection)
    model.forward = stand_in

    def undo() -> None:
        if vars(model).get("forward") is not stand_in:
            return
        if was_own:
            model.forward = stand_in.function
        else:
            del model.forward

    return undo
