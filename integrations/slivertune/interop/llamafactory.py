"""HiFT and SFT as optimizers of LLaMA-Factory v1, from `optim_config` of its YAML.

    from llamafactory.v1.trainers.sft_trainer import run_sft
    from slivertune.interop.llamafactory import register_optimizers

    register_optimizers()
    run_sft()

    optim_config:
      name: slivertune_hift
      lr: 2.0e-5
      layers_per_group: 4

The other names beside `lr` are AdamW's options and the fields of `HiFTConfig`, or of `SFTConfig` with the name
`slivertune_sft`. LLaMA-Factory is imported only by `register_optimizers`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from torch import nn
from torch.distributed.tensor import DTensor

from slivertune.core.layout import world_size
from slivertune.core.missing_library import missing_library
from slivertune.core.setting_checks import check_number
from slivertune.hift import HiFT, HiFTConfig
from slivertune.interop.plugin_settings import make_setting
from slivertune.sft import SFT, SFTConfig
from slivertune.sft.targets import find_targets

_PLACE = "optim_config"
_PLUGIN_MODULE = "llamafactory.v1.plugins.trainer_plugins.optimizer"
_ADAMW = ("lr", "betas", "eps", "weight_decay")


def build_hift(model: nn.Module, optim_config: Mapping[str, Any]) -> HiFT:
    """Build HiFT around torch's AdamW, as an optimizer plugin of LLaMA-Factory.

    Args:
        model: The trainer's model, on its device.
        optim_config: `lr`, AdamW's other options if they differ from torch's defaults, and fields of `HiFTConfig`.

    Raises:
        ValueError: If the run is distributed, `lr` is missing, a name is unknown, or the settings don't fit the model.
    """
    options, config = _read(optim_config, HiFTConfig, _ADAMW, required=("lr",))
    _check_one_process(model, "HiFT")
    return HiFT(model, torch.optim.AdamW, config=config, **options)


def build_sft(model: nn.Module, optim_config: Mapping[str, Any]) -> SFT:
    """Build SFT, as an optimizer plugin of LLaMA-Factory.

    Args:
        model: The trainer's model, on its device.
        optim_config: `lr`, `total_steps` (updates in the whole run), SFT's other options, and fields of `SFTConfig`.

    Raises:
        ValueError: If the run is distributed, `lr` or `total_steps` is missing, a name is unknown, the settings don't
            fit the model, or the deltas would be stored beside the weights, where the trainer does not save them.
    """
    options, config = _read(
        optim_config, SFTConfig, (*_ADAMW, "momentum", "total_steps"), required=("lr", "total_steps")
    )
    _check_one_process(model, "SFT")
    in_4bit = [target.name for target in find_targets(model, config) if target.is_4bit]
    if config.form == "layer" or in_4bit:
        reason = "form='layer'" if config.form == "layer" else f"{in_4bit[0]} is a 4-bit weight"
        raise ValueError(
            f"{_PLACE}: {reason}, so that deltas are stored beside the weights, and LLaMA-Factory saves only the "
            "weights. Load the model without quant_config and use form='optimizer', or train by slivertune train"
        )
    return SFT(model, config=config, **options)


_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "slivertune_hift": build_hift,
    "slivertune_sft": build_sft,
}


def register_optimizers() -> None:
    """Register `slivertune_hift` and `slivertune_sft` with LLaMA-Factory v1. Call it before its trainer is made.

    Raises:
        ImportError: If LLaMA-Factory is not installed, or a version that has no such plugins.

    Example:
        >>> register_optimizers()
        >>> run_sft()  # llamafactory.v1.trainers.sft_trainer, with `optim_config: {name: slivertune_hift, lr: 2.0e-5}`
    """
    try:
        plugin: Any = import_module(_PLUGIN_MODULE).OptimizerPlugin
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{missing_library('register_optimizers()', 'llamafactory==0.9.5')} ({_PLUGIN_MODULE}: {error})"
        ) from error
    for name, build in _OPTIMIZERS.items():
        plugin(name).register()(build)


def _read(
    optim_config: Mapping[str, Any], kind: type[Any], known: tuple[str, ...], required: tuple[str, ...]
) -> tuple[dict[str, Any], Any]:
    """Split `optim_config` into the optimizer's options and the method's settings."""
    values = {name: value for name, value in optim_config.items() if name != "name"}
    for name in required:
        if values.get(name) is None:
            raise ValueError(
                f"{_PLACE}: {name} is missing. LLaMA-Factory does not pass its own value to an optimizer plugin, so "
                f"write {name} under {_PLACE}"
            )
    given = {name: values.pop(name, None) for name in known}
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name != "betas":
            check_number(f"{_PLACE}: {name}", value)
        elif not isinstance(value, Sequence) or len(value) != 2:
            raise ValueError(f"{_PLACE}: betas={value!r} must be two numbers. Write them as in betas: [0.9, 0.999]")
        else:
            options[name] = tuple(value)
    return options, make_setting(kind, values, _PLACE, others=known)


def _check_one_process(model: nn.Module, title: str) -> None:
    """Refuse runs that LLaMA-Factory distributes, since it averages or shards gradients in its own way."""
    ranks = world_size()
    found = f"{ranks} ranks" if ranks > 1 else None
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        found = "FSDP2"
    if is_initialized() and str(AcceleratorState().distributed_type).endswith("DEEPSPEED"):
        found = "DeepSpeed"
    if found is not None:
        raise ValueError(
            f"{title} under LLaMA-Factory trains in one process without dist_config, and this run has {found}. Leave "
            "dist_config out and start one process. For several ranks use slivertune train, or slivertune.attach with "
            "the Trainer of transformers"
        )
