"""Copy, load and compare the hyperparameters in an optimizer's param groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


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
