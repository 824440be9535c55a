"""What HiFT and SFT have in common on a DeepSpeed engine: the config's limits, making it, and taking a place in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedSchedulerWrapper
from torch import nn

from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.consistency.timeouts import keeping_timeout

UnsupportedSetting = Sequence[tuple[str, str, str]]
"""Section and key of a setting that is to be off, and what to do."""

_BY_NEITHER: UnsupportedSetting = (
    ("hybrid_engine", "enabled", "set it to false"),
    ("compile", "deepcompile", "set it to false"),
    ("tensor_parallel", "autotp_size", "set it to 1, and shard by ZeRO-3"),
    ("checkpoint", "load_universal", "leave it out: any number of ranks resumes from a checkpoint as it is"),
)


def check_stage(config: Mapping[str, Any], method: str) -> int:
    """Refuse a DeepSpeed config that shares nothing out. Pure.

    Args:
        config: The config; values may be "auto".
        method: For the message.

    Returns:
        The stage of ZeRO.

    Raises:
        ValueError: If it is not 1, 2 or 3.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_optimization.stage is {stage!r}; {method} on DeepSpeed needs stage 1, 2 or 3. Without sharding, use "
            "DDP through accelerate"
        )
    return int(stage)


def refuse_unsupported(config: Mapping[str, Any], method: str, own: UnsupportedSetting) -> None:
    """Refuse settings that don't go together with a method. Pure.

    Args:
        config: The config; values may be "auto".
        method: For the message.
        own: What this method does not support, beside what neither does.

    Raises:
        ValueError: Naming the first that is on, and what to do.
    """
    for where, key, use in (*own, *_BY_NEITHER):
        section: Any = config.get(where)
        value = section.get(key) if isinstance(section, Mapping) else None
        if value not in (None, False, 0, 1, "auto") or value is True:
            raise ValueError(f"{where}.{key}={value!r} does not go together with {method}; {use}")
    if str((config["zero_optimization"].get("offload_param") or {}).get("device", "none")) == "nvme":
        raise ValueError(
            f"zero_optimization.offload_param (device 'nvme') leaves no part of the weights in memory, where {method} "
            "reads them; use device 'cpu'"
        )


def prepare_over(
    accelerator: Any, model: nn.Module, objects: tuple[Any, ...], own: Any, first: torch.optim.Optimizer
) -> tuple[list[Any], Any]:
    """Let accelerate prepare all objects, with the engine built over another optimizer than the method's own.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The one among the objects.
        objects: All that is to be prepared.
        own: The method's optimizer among them.
        first: What the engine is built over.

    Returns:
        The prepared objects in the same order, and DeepSpeed's engine.
    """
    with guard("making the engine", computes=True), keeping_timeout():
        prepared = list(accelerator.prepare(*(first if each is own else each for each in objects)))
    return prepared, prepared[objects.index(model)]


def initialize_over(first: torch.optim.Optimizer, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Make a bare DeepSpeed engine over an optimizer.

    Args:
        first: What the engine is built over.
        config: DeepSpeed's; changed in place.
        arguments: The others of `deepspeed.initialize`.

    Returns:
        The engine, and the loader.
    """
    import deepspeed

    # What the list of optimizers that DeepSpeed has tested guards against, the method has looked at.
    config.setdefault("zero_allow_untested_optimizer", True)
    with guard("making the engine", computes=True), keeping_timeout():
        engine, _, loader, _ = deepspeed.initialize(optimizer=first, config=config, **arguments)
    return engine, loader


def replace_prepared(accelerator: Any, prepared: list[Any], old: Any, new: Any, engine: Any) -> None:
    """Put an optimizer where accelerate has put that over which the engine was built.

    Args:
        accelerator: `accelerate.Accelerator`.
        prepared: What it has prepared; changed in place.
        old: The optimizer that it has prepared.
        new: What training loops and schedules are to see.
        engine: DeepSpeed's.
    """
    prepared[next(index for index, each in enumerate(prepared) if each is old)] = new
    accelerator._optimizers[accelerator._optimizers.index(old)] = new
    for each in prepared:
        if isinstance(each, DeepSpeedSchedulerWrapper):
            each.scheduler = engine.lr_scheduler
        if isinstance(each, AcceleratedScheduler):
            each.optimizers = [new if held is old else held for held in each.optimizers]


def drive_by_config(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let the schedule of the engine's config, if it has one, drive an optimizer over which the engine was not built.

    Args:
        engine: DeepSpeed's.
        optimizer: Whose param groups it is to drive.
    """
    if engine.lr_scheduler is not None and engine.client_lr_scheduler is None:
        engine.lr_scheduler = engine._scheduler_from_config(optimizer)
