"""What HiFT and SFT have in common on a DeepSpeed engine: making it, and taking the place of its optimizer."""

from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedSchedulerWrapper
from torch import nn

from slivertune.parallel.accelerate_internals import prepared_optimizers
from slivertune.parallel.consistency.explain import explain_saving
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.consistency.timeouts import keeping_timeout
from slivertune.parallel.zero.deepspeed_internals import schedule_of_config


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


def replace_prepared(accelerator: Any, prepared: list[Any], place: int, new: Any, engine: Any) -> tuple[Any, ...]:
    """Put an optimizer where accelerate has put that over which the engine was built.

    Args:
        accelerator: `accelerate.Accelerator`; its ways of saving name a rank that is missing from now on.
        prepared: What it has prepared.
        place: Where among that the optimizer is.
        new: What training loops and schedules are to see.
        engine: DeepSpeed's.

    Returns:
        The prepared objects, with the new one.
    """
    explain_saving(accelerator)
    old, prepared[place] = prepared[place], new
    kept = prepared_optimizers(accelerator)
    kept[kept.index(old)] = new
    for each in prepared:
        if isinstance(each, DeepSpeedSchedulerWrapper):
            each.scheduler = engine.lr_scheduler
        if isinstance(each, AcceleratedScheduler):
            each.optimizers = [new if held is old else held for held in each.optimizers]
    return tuple(prepared)


def drive_by_config(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let the schedule of the engine's config, if it has one, drive an optimizer over which the engine was not built.

    Args:
        engine: DeepSpeed's.
        optimizer: Whose param groups it is to drive.
    """
    if engine.lr_scheduler is not None and engine.client_lr_scheduler is None:
        engine.lr_scheduler = schedule_of_config(engine, optimizer)
