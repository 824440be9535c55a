"""What of a model HiFT trains, by the param groups of the base optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slivertune.hift.piece import Weight


def trainable_weights(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> dict[str, Weight]:
    """The weights that the param groups train, by name, in the model's order.

    Args:
        model: The model.
        param_groups: Those of the base optimizer.

    Raises:
        ValueError: If a param group holds what is no parameter of the model, or a weight is fp16.
    """
    group_of: dict[int, int] = {}
    for index, group in enumerate(param_groups):
        group_of.update({id(parameter): index for parameter in group["params"]})
    named = dict(model.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    num_foreign = sum(key not in own for key in group_of)
    if num_foreign:
        raise ValueError(
            f"{num_foreign} of the optimizer's {len(group_of)} parameters are not the model's; "
            "build the optimizer over the parameters of the model that is passed here"
        )
    weights = {
        name: Weight(name=name, parameter=parameter, param_group=group_of[id(parameter)])
        for name, parameter in named.items()
        if parameter.requires_grad and id(parameter) in group_of
    }
    for name, weight in weights.items():
        if weight.parameter.dtype == torch.float16:
            raise ValueError(
                f"{name} is stored in float16, whose range is too small for weights that are trained; "
                "load the model in bfloat16, or in float32 with fp16 autocast and a GradScaler"
            )
    return weights


def say_what_stays_frozen(model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Warn of parameters that HiFT does not train, if there are any.

    Args:
        model: The model.
        weights: What is trained, by name.
    """
    frozen = [name for name, _ in model.named_parameters() if name not in weights]
    if frozen:
        warnings.warn(
            f"{len(frozen)} of {len(frozen) + len(weights)} parameters do not require gradients or are not in the "
            f"optimizer ({frozen[0]}, ...); HiFT keeps them frozen",
            UserWarning,
            stacklevel=4,
        )
