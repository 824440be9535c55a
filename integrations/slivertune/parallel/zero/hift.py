"""HiFT on ZeRO-1, 2 and 3 under accelerate: each rank keeps and steps its share of the active group.

On a rank the device holds the weights (under ZeRO-3 its share of them), its share of the active group's fp32 masters
and state, that group's gradients and one reduce bucket; its shares of all other groups wait in host memory.

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
    """What a training loop holds for HiFT on an engine: `accelerator.backward` steps, `step` does nothing.

    Args:
        optimizer: HiFT; its param groups are the schedule's.
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
    """Prepare a model and HiFT for DeepSpeed; see `slivertune.prepare`.

    Args:
        accelerator: An Accelerator with a DeepSpeed plugin of stage 1, 2 or 3.
        model: The model.
        hift: Built over it.
        objects: All that is to be prepared, these two included.

    Returns:
        The prepared objects, in their order; the model is DeepSpeed's engine.

    Raises:
        ValueError: If the ranks disagree, or HiFT and the config don't go together.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    first = built_over(hift, config)
    fill_buckets(config, model)
    prepared, engine = prepare_over(accelerator, model, objects, hift, first)
    rotate(engine, hift)
    return replace_prepared(accelerator, prepared, objects.index(hift), EngineSteppedOptimizer(hift, engine), engine)


def initialize(hift: HiFT, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, HiFT, Any, Any]:
    """Make a bare DeepSpeed engine that steps HiFT; see `slivertune.initialize`.

    Args:
        hift: Built over the model among the arguments.
        config: DeepSpeed's, without "auto".
        arguments: The others of `deepspeed.initialize`.

    Returns:
        The engine, HiFT, the loader and the schedule.

    Raises:
        ValueError: If the ranks disagree, or HiFT and the config don't go together.
    """
    engine, loader = initialize_over(built_over(hift, config), config, arguments)
    rotate(engine, hift)
    return engine, hift, loader, engine.lr_scheduler


def built_over(optimizer: HiFT, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Refuse what can't be rotated, on every rank alike, and compare the ranks' configs. A collective.

    Args:
        optimizer: HiFT.
        config: DeepSpeed's, not yet used; changed in place.

    Returns:
        What the engine is to be built over.

    Raises:
        ValueError: Naming the setting and what to use.
    """
    warn_of_stream_bytes(optimizer.config)
    check_hift_config(config)
    check_agreement({f"the DeepSpeed config's {key}": json.dumps(value, default=str) for key, value in config.items()})
    fill_clipping(config)
    return optimizer_of_group(optimizer, optimizer.active_group)


def rotate(engine: Any, optimizer: HiFT) -> None:
    """Put HiFT's rotation on an engine that was built over the first group.

    Args:
        engine: DeepSpeed's engine; some of its methods are overridden, on this instance, and it keeps the rotation, as
            `engine.hift_schedule`.
        optimizer: HiFT; the engine steps in its place from now on.

    Raises:
        ValueError: If the engine chose an optimizer that can't be rotated.
    """
    check_engine_optimizer(type(engine.optimizer).__name__)
    optimizer.delegate_to(f"DeepSpeed's ZeRO-{engine.zero_optimization_stage()} engine")
    with keeping_timeout():
        schedule = GroupSchedule(engine, optimizer, engine.module)
    Checkpoints(schedule)
    complete_engine(engine, optimizer)
    engine.hift_schedule = schedule
