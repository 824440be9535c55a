"""Copy, load and compare the hyperparameters in an optimizer's param groups."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

InnerGroups = Iterable[tuple[dict[str, Any], int]]
"""Param groups of an optimizer that is stepped in another's place, each with the index of the other's group."""
Pushed = defaultdict[int, dict[str, Any]]
"""Hyperparameters given last to such an optimizer, by that index. They reveal its own adaptations."""


def own_copy(value: Any) -> Any:
    """Copy a hyperparameter if it is a tensor, so that no one else can change it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def own_hyperparameters(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a param group's hyperparameters: all entries but its parameters."""
    return {key: own_copy(value) for key, value in param_group.items() if key != "params"}


def load_hyperparameters(param_groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each param group a copy of the hyperparameters of a saved one.

    Args:
        param_groups: Param groups of the optimizer.
        saved: As many saved param groups, in the same order.
    """
    for param_group, theirs in zip(param_groups, saved, strict=True):
        param_group.update(own_hyperparameters(theirs))


def in_form_of(own: Any, value: Any) -> Any:
    """Turn a number into a 0-dimensional tensor if the optimizer's own value is one (torchao's learning rate)."""
    if isinstance(own, torch.Tensor) and not own.dim() and isinstance(value, (int, float)):
        return torch.full_like(own, value)
    return value


def differs(old: Any, new: Any) -> bool:
    """Return whether two hyperparameters are not the same value."""
    if old is new:
        return False
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and torch.equal(old, new))
    return bool(old != new)


def push_hyperparameters(
    groups: InnerGroups, pushed: Pushed, outer: Sequence[Mapping[str, Any]], learning_rates: Sequence[Any]
) -> None:
    """Give an optimizer the hyperparameters that have changed since the last call, and note them in `pushed`.

    A hyperparameter that the schedule did not change keeps the optimizer's value: some adapt their own.

    Args:
        groups: Param groups of the optimizer.
        pushed: Hyperparameters given last.
        outer: Param groups of the user.
        learning_rates: Learning rates to apply in place of theirs.
    """
    for inner, index in groups:
        given = pushed[index]
        for key, value in {**outer[index], "lr": learning_rates[index]}.items():
            if key != "params" and (key not in given or differs(given[key], value)):
                inner[key] = in_form_of(inner.get(key), own_copy(value))
                given[key] = own_copy(value)


def find_adapted(groups: InnerGroups, pushed: Pushed) -> dict[int, dict[str, Any]]:
    """Return hyperparameters that an optimizer changed itself (as adaptive step sizes), by index of the user's group.

    Args:
        groups: Param groups of the optimizer.
        pushed: Hyperparameters given last.
    """
    adapted = {}
    for inner, index in groups:
        given = pushed[index].items()
        if own := {key: own_copy(inner[key]) for key, value in given if key in inner and differs(value, inner[key])}:
            adapted[index] = own
    return adapted


def restore_adapted(
    groups: InnerGroups, pushed: Pushed, outer: Sequence[Mapping[str, Any]], adapted: Mapping[int, Mapping[str, Any]]
) -> None:
    """Restore the hyperparameters that `find_adapted` returned.

    Args:
        groups: Param groups of the optimizer.
        pushed: Hyperparameters given last.
        outer: Param groups of the user.
        adapted: Hyperparameters that an optimizer in its place had changed.
    """
    for inner, index in groups:
        own = adapted.get(index, {})
        inner.update(own)
        pushed[index] = {key: own_copy(outer[index][key]) for key in own}
