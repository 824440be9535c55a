"""Which optimizer trains a parameter: one at a time.

An optimizer that freezes or wraps what it trains leaves no mark that a second one could see, so it registers here. The
registry holds neither parameters nor optimizers; an optimizer that is gone holds nothing.
"""

import gc
import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_owners = WeakTensorKeyDictionary()


def owner_of(parameter: torch.Tensor) -> object | None:
    """The optimizer that trains a parameter, if one that still exists does."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


def check_free(named_parameters: Iterable[tuple[str, torch.Tensor]], newcomer: str) -> None:
    """Refuse to build an optimizer over parameters that another one trains.

    Args:
        named_parameters: All parameters of the model, with their names.
        newcomer: What is to be built.

    Raises:
        ValueError: Naming a parameter, who trains it, and the way out.
    """
    named = list(named_parameters)
    if any(owner_of(parameter) is not None for _, parameter in named):
        gc.collect()  # a scheduler and its optimizer, say, hold each other when both were dropped
    for name, parameter in named:
        owner = owner_of(parameter)
        if owner is not None:
            raise ValueError(
                f"{name} is trained by another {type(owner).__name__}, which was built over this model before, so "
                f"{newcomer} can't train it; call detach() of that one first, or drop it"
            )


def take(parameters: Iterable[torch.Tensor], owner: object) -> None:
    """Register that `owner` trains these parameters."""
    reference = weakref.ref(owner)
    for parameter in parameters:
        _owners[parameter] = reference


def release(parameters: Iterable[torch.Tensor], owner: object) -> None:
    """End what `take` registered; parameters of another owner stay that one's."""
    for parameter in parameters:
        if owner_of(parameter) is owner:
            del _owners[parameter]
