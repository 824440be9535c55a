"""Values in an optimizer's param groups, taken over so that no one else can change them."""

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
