"""Find the weights of a model that HiFT trains, by the param groups of the base optimizer."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slivertune.core.layout import world_size
from slivertune.core.torch_internals import uncompiled_module
from slivertune.hift.chunk import Weight
from slivertune.hift.config import MasterKind


def trainable_weights(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> dict[str, Weight]:
    """Return the weights that the param groups train, by name, in the model's order.

    Args:
        model: Model that holds them.
        param_groups: Param groups of the base optimizer.

    Raises:
        ValueError: If a param group holds a tensor that is not a parameter of the model, a weight is fp16 or
            offloaded, or the model is a result of `torch.compile`.
    """
    if uncompiled_module(model) is not model:
        raise ValueError(
            f"this is {type(uncompiled_module(model)).__name__} as torch.compile returned it, with another graph in "
            "every turn of HiFT. Give HiFT the model itself, and compile its blocks, which share a few graphs: "
            "slivertune.compile_blocks(model)"
        )
    group_of: dict[int, int] = {}
    for index, group in enumerate(param_groups):
        group_of.update({id(parameter): index for parameter in group["params"]})
    named = dict(model.named_parameters())
    num_foreign = len(group_of.keys() - {id(parameter) for parameter in named.values()})
    if num_foreign:
        raise ValueError(
            f"{num_foreign} of the optimizer's {len(group_of)} parameters are not the model's. "
            "Build the optimizer over the parameters of the model that is passed here"
        )
    weights = {
        name: Weight(name=name, parameter=parameter, trained=parameter, param_group=group_of[id(parameter)])
        for name, parameter in named.items()
        if parameter.requires_grad and id(parameter) in group_of
    }
    for name, weight in weights.items():
        if weight.parameter.dtype == torch.float16:
            raise ValueError(
                f"{name} is stored in float16, whose range is too small for weights that are trained. "
                "Load the model in bfloat16, or in float32 with fp16 autocast and a GradScaler"
            )
    _refuse_offloaded(model, weights)
    return weights


def check_master(master: MasterKind, weights: Iterable[Weight]) -> None:
    """Refuse stochastic rounding of a model that has nothing to round.

    Args:
        master: Setting of `HiFTConfig`.
        weights: Trained weights.

    Raises:
        ValueError: If `master` is `stochastic` and no weight is bf16.
    """
    dtypes = {weight.parameter.dtype for weight in weights}
    if master == "stochastic" and torch.bfloat16 not in dtypes:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"master='stochastic' rounds weights to bf16, and those that train are {names}. "
            "Load the model in bf16 (dtype=torch.bfloat16), or leave master out"
        )


def say_what_is_not_trained(model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Warn of parameters that HiFT does not train, if there are any.

    Args:
        model: Model that holds them.
        weights: Trained weights, by name.
    """
    others = {name: parameter for name, parameter in model.named_parameters() if name not in weights}
    frozen = [name for name, parameter in others.items() if not parameter.requires_grad]
    free = [name for name, parameter in others.items() if parameter.requires_grad]
    said = [
        f"{len(names)} of {len(others) + len(weights)} parameters {what} ({names[0]}, ...)"
        for names, what in (
            (frozen, "do not require gradients, and HiFT keeps them frozen"),
            (free, "require gradients but are not in the optimizer, so that HiFT neither trains nor freezes them"),
        )
        if names
    ]
    if said:
        warnings.warn("; ".join(said), UserWarning, stacklevel=4)


def _refuse_offloaded(model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Refuse parameters whose values are offloaded and loaded only for a forward."""
    # If several ranks load one checkpoint, ranks without values get them when the model is prepared.
    is_alone = world_size() == 1
    away = {
        id(parameter)
        for module in model.modules()
        if _offloads(getattr(module, "_hf_hook", None))
        for parameter in module.parameters(recurse=False)
    }
    for name, weight in weights.items():
        on_meta = weight.parameter.device.type == "meta"
        if id(weight.parameter) in away or (on_meta and is_alone):
            raise ValueError(
                f"{name} is {'on meta' if on_meta else 'offloaded'} (accelerate's cpu_offload, disk_offload or a "
                "device_map, or a model that was built without values), where it can't be trained. Load the whole "
                "model on one device: HiFT offloads masters and state"
            )


def _offloads(hook: Any) -> bool:
    return bool(getattr(hook, "offload", False)) or any(_offloads(each) for each in getattr(hook, "hooks", ()))
