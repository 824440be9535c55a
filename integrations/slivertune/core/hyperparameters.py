"""Hyperparameters in an optimizer's param groups: copied, loaded, and pushed into the instances of a base optimizer."""

from __future__ import annotations

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


class PushedHyperparameters:
    """What one param group of an instance was given last, so that what the instance changes by itself can be told.

    What the schedule did not touch stays in the instance: some optimizers adapt their own hyperparameters.
    """

    def __init__(self) -> None:
        self._pushed: dict[str, Any] = {}

    def push(self, inner: dict[str, Any], outer: Mapping[str, Any], learning_rate: Any) -> None:
        """Give an instance's param group what has changed since the last time.

        Args:
            inner: The instance's param group.
            outer: The user's.
            learning_rate: What is applied in place of the user's.
        """
        for key, value in {**outer, "lr": learning_rate}.items():
            if key != "params" and (key not in self._pushed or differs(self._pushed[key], value)):
                inner[key] = _in_form_of(inner.get(key), own_copy(value))
                self._pushed[key] = own_copy(value)

    def adapted(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        """What the instance itself has changed in its param group: adaptive step sizes and the like."""
        return {
            key: own_copy(value)
            for key, value in inner.items()
            if key in self._pushed and differs(self._pushed[key], value)
        }

    def restore(self, inner: dict[str, Any], outer: Mapping[str, Any], adapted: Mapping[str, Any]) -> None:
        """Put back what `adapted` returned.

        Args:
            inner: The instance's param group.
            outer: The user's.
            adapted: What the instance had changed.
        """
        inner.update(adapted)
        self._pushed = {key: own_copy(outer[key]) for key in adapted}


def _in_form_of(own: Any, value: Any) -> Any:
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
