"""Hyperparameters in an optimizer's param groups: copied, loaded and compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def own_copy(value: Any) -> Any:
    """A hyperparameter that no one else can change: tensors are copied."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def own_hyperparameters(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a param group's hyperparameters: all but its parameters."""
    return {key: own_copy(value) for key, value in param_group.items() if key != "params"}


def load_hyperparameters(param_groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each param group a copy of the hyperparameters of a saved one.

    Args:
        param_groups: The optimizer's.
        saved: As many, in the same order.
    """
    for param_group, theirs in zip(param_groups, saved, strict=True):
        param_group.update(own_hyperparameters(theirs))


def in_form_of(own: Any, value: Any) -> Any:
    """A number as the 0-dimensional tensor that an instance has made of it (torchao's learning rate)."""
    if isinstance(own, torch.Tensor) and not own.dim() and isinstance(value, (int, float)):
        return torch.full_like(own, value)
    return value


def differs(old: Any, new: Any) -> bool:
    """Whether two hyperparameters are not the same value."""
    if old is new:
        return False
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and torch.equal(old, new))
    return bool(old != new)
