"""HiFT on ZeRO-1, 2 and 3: each rank keeps and steps its share of the active group.

A rank's device holds the weights (under ZeRO-3 its share of them), its share of the active group's fp32 masters and
state, that group's gradients and one reduce bucket. Its shares of all other groups are offloaded to host memory.

DeepSpeed accumulates bf16 gradients in bf16 unless the config says `data_types.grad_accum_dtype: fp32` (stages 2, 3).
"""

import json
from typing import Any

import torch
from accelerate.utils import DeepSpeedOptimizerWrapper
from torch import nn

from slivertune.hift import HiFT
from slivertune.parallel.consistency.heartbeat import check_agreement
from slivertune.parallel.consistency.processes import keeping_timeout
from slivertune.parallel.zero.checkpoint import Checkpoints
from slivertune.parallel.zero.engine import complete_engine, initialize_over, prepare_over, replace_prepared
from slivertune.parallel.zero.schedule import GroupSchedule, optimizer_of_group
from slivertune.parallel.zero.unsupported import (
    check_engine_optimizer,
    check_hift_config,
    fill_buckets,
    fill_clipping,
    warn_of_stream_bytes,
)


class EngineSteppedOptimizer(DeepSpeedOptimizerWrapper):  # type: ignore[misc]
    """Optimizer of a training loop for HiFT on an engine: `accelerator.backward` steps, `step` does nothing.

    Args:
        optimizer: HiFT; a schedule drives its param groups.
        engine: DeepSpeed's engine.
    """

    def __init__(self, optimizer: HiFT, engine: Any) -> None:
        super().__init__(optimizer)
        self._engine = engine

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step overflowed, in fp16."""
        return bool(self._engine.optimizer.overflow)


def prepare(accelerator: Any, model: nn.Module, hift: HiFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare a model and HiFT for DeepSpeed. See `slivertune.prepare`.

    Args:
        accelerator: An Accelerator with a DeepSpeed plugin of stage 1, 2 or 3.
        model: The model.
        hift: HiFT built over the model.
        objects: All objects to prepare, including the model and HiFT.

    Returns:
        The prepared objects in the same order; the model is DeepSpeed's engine.

    Raises:
        ValueError: If the ranks disagree, or the config does not support HiFT.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    first = built_over(hift, config)
    fill_buckets(config, model)
    prepared, engine = prepare_over(accelerator, model, objects, hift, first)
    rotate(engine, hift)
    return replace_prepared(accelerator, prepared, objects.index(hift), EngineSteppedOptimizer(hift, engine), engine)


def initialize(hift: HiFT, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, HiFT, Any, Any]:
    """Make a bare DeepSpeed engine that steps HiFT. See `slivertune.initialize`.

    Args:
        hift: HiFT built over the model among the arguments.
        config: DeepSpeed's config without "auto".
        arguments: The other arguments of `deepspeed.initialize`.

    Returns:
        The engine, HiFT, the loader and the schedule.

    Raises:
        ValueError: If the ranks disagree, or the config does not support HiFT.
    """
    engine, loader = initialize_over(built_over(hift, config), config, arguments)
    rotate(engine, hift)
    return engine, hift, loader, engine.lr_scheduler


def built_over(optimizer: HiFT, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Make the optimizer to build the engine over, after checks of the config on all ranks. A collective.

    Args:
        optimizer: HiFT.
        config: DeepSpeed's config before its use; changed in place.

    Returns:
        The first group's optimizer, over which to build the engine.

    Raises:
        ValueError: If HiFT can't run under the config, or ranks differ in it; names the setting and what to use.
    """
    warn_of_stream_bytes(optimizer.config)
    check_hift_config(config)
    check_agreement({f"the DeepSpeed config's {key}": json.dumps(value, default=str) for key, value in config.items()})
    fill_clipping(config)
    return optimizer_of_group(optimizer, optimizer.active_group)


def rotate(engine: Any, optimizer: HiFT) -> None:
    """Install HiFT's rotation on an engine that was built over the first group.

    Args:
        engine: DeepSpeed's engine; some of its methods are overridden on this instance, and it keeps the rotation as
            `engine.hift_schedule`.
        optimizer: HiFT; the engine steps in its place from now on.

    Raises:
        ValueError: If the engine chose an optimizer that can't be rotated.
    """
    check_engine_optimizer(type(engine.optimizer).__name__)
    optimizer.delegate_to(f"DeepSpeed's ZeRO-{engine.zero_optimization_stage()} engine")
    with keeping_timeout():
        schedule = GroupSchedule(engine, optimizer, engine.module)
    optimizer.follow_engine(schedule)
    Checkpoints(schedule)
    complete_engine(engine, optimizer)
    engine.hift_schedule = schedule
