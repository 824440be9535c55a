"""`slivertune.initialize`, which replaces `deepspeed.initialize` in scripts on bare DeepSpeed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slivertune.core.missing_library import missing_library
from slivertune.core.sliver import Sliver
from slivertune.parallel.adapters import check_before, engine_adapter_of, note_prepared
from slivertune.parallel.consistency.heartbeat import check_agreement
from slivertune.parallel.layout import LAYOUT_OF_STAGE
from slivertune.parallel.zero.unsupported import check_stage
from slivertune.parked.park import refuse_parked

_FILLED_ELSEWHERE = ("train_batch_size", "train_micro_batch_size_per_gpu")
_SIZES = {
    "reduce_bucket_size": (1, 2),
    "stage3_prefetch_bucket_size": (0.9, 2),
    "stage3_param_persistence_threshold": (10, 1),
}
"""Number of elements, as a factor and a power of the model's width."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Make a DeepSpeed engine that trains a sliver of the model per step. Arguments are as for `deepspeed.initialize`.

    The training loop stays the same: `engine(**batch)`, `engine.backward(loss)`, `engine.step()`,
    `engine.save_checkpoint`. Any schedule drives HiFT's param groups: one built over HiFT, a callable that takes HiFT,
    or the config's own. If the optimizer is neither HiFT nor SFT, this calls `deepspeed.initialize`.

    Args:
        args: As for DeepSpeed.
        model: The model, on the CPU or the device.
        optimizer: HiFT or SFT over the model's parameters, before its first step; or any other optimizer.
        model_parameters: As for DeepSpeed; only for other optimizers.
        training_data: As for DeepSpeed.
        lr_scheduler: As for DeepSpeed; built over the optimizer, or a callable that takes it.
        distributed_port: As for DeepSpeed.
        mpu: As for DeepSpeed.
        dist_init_required: As for DeepSpeed.
        collate_fn: As for DeepSpeed.
        config: As for DeepSpeed: a path or a dictionary. "auto" means: no accumulation, no clipping, the model's
            dtype. The batch size must be given.
        mesh_param: As for DeepSpeed.
        config_params: As `config`.

    Returns:
        The engine, the optimizer (HiFT itself: `param_groups`, `held_lr`, `active_group`), the loader of
        `training_data`, and the schedule; None for each that does not exist.

    Raises:
        ImportError: If DeepSpeed is not installed.
        ValueError: If model or config is missing, the ranks disagree, or the config does not support the method.
        RuntimeError: If the optimizer is in an engine already, or has stepped.

    Example:
        >>> engine, optimizer, loader, _ = slivertune.initialize(model=model, optimizer=optimizer, config=config)
    """
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(missing_library("slivertune.initialize", "deepspeed")) from error
    arguments: dict[str, Any] = {
        "args": args,
        "model": model,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "distributed_port": distributed_port,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
        "mesh_param": mesh_param,
    }
    chosen = config if config is not None else config_params
    if not isinstance(optimizer, Sliver):
        made: tuple[Any, Any, Any, Any] = deepspeed.initialize(
            optimizer=optimizer, lr_scheduler=lr_scheduler, config=chosen, **arguments
        )
        return made
    if model is None:
        raise ValueError("initialize needs a model. Pass the one that the optimizer was built over")
    if model_parameters is not None:
        raise ValueError("model_parameters are in the optimizer already. Leave them out")
    if chosen is None and args is not None:
        chosen = getattr(args, "deepspeed_config", None)
        arguments["args"] = None
    if chosen is None:
        raise ValueError("initialize needs DeepSpeed's config. Pass a path or a dictionary")
    settings = resolve_config(chosen, model)
    layout = LAYOUT_OF_STAGE[check_stage(settings, type(optimizer).__name__)]
    adapter = engine_adapter_of(optimizer, layout)
    check_before(optimizer, model, layout)
    refuse_parked(model, "initialize it for DeepSpeed")
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    arguments["lr_scheduler"] = lr_scheduler
    deepspeed.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    check_agreement(optimizer.facts())
    prepared = adapter.initialize(optimizer, settings, arguments)
    note_prepared(optimizer, layout)
    return prepared


def resolve_config(config: str | Path | dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Replace "auto" in a DeepSpeed config, as accelerate and the Trainer do. Keep none at its top level.

    Args:
        config: A path, or a dictionary, which is not changed.
        model: Gives the precision and the width.

    Raises:
        ValueError: If the batch size is "auto", a size can't be filled in, or the config is no JSON object.
    """
    settings = _read_config(config)
    for key in _FILLED_ELSEWHERE:
        if settings.get(key) == "auto":
            del settings[key]
    if not any(key in settings for key in _FILLED_ELSEWHERE):
        raise ValueError(
            'the DeepSpeed config leaves the batch size "auto", which only accelerate and the Trainer fill in. Set '
            "train_micro_batch_size_per_gpu"
        )
    for key, value in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0)):
        if settings.get(key) == "auto":
            settings[key] = value
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(
            f"zero_optimization must be an object in the DeepSpeed config, not {str(zero)[:60]}. Give its stage, as in "
            '{"stage": 2}'
        )
    _fill_sizes(zero, model)
    dtype = next(model.parameters()).dtype
    for name, own in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        section = settings.get(name)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            section["enabled"] = dtype == own
    # DeepSpeed replaces "auto" inside a section by its own default; at the top level it fails.
    return {key: value for key, value in settings.items() if value != "auto"}


def _read_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Copy a DeepSpeed config as the JSON that DeepSpeed reads."""
    name = "the DeepSpeed config" if isinstance(config, dict) else f"the DeepSpeed config {config}"
    try:
        text = json.dumps(config) if isinstance(config, dict) else Path(config).read_text(encoding="utf-8")
        settings = json.loads(text)
    except FileNotFoundError:
        raise
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} can't be read as JSON: {error}. Pass a dictionary or a JSON file") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name} must be a JSON object, not {str(settings)[:60]}. Write its settings by name")
    return settings


def _fill_sizes(zero: dict[str, Any], model: nn.Module) -> None:
    """Fill in sizes by the model's width, as accelerate does. DeepSpeed's default bucket has 500M elements."""
    for key, (factor, power) in _SIZES.items():
        if zero.get(key) == "auto":
            width = getattr(getattr(model, "config", None), "hidden_size", None)
            if width is None:
                raise ValueError(
                    f'zero_optimization.{key} is "auto", and the model has no config.hidden_size. Write a number'
                )
            zero[key] = int(factor * width**power)
