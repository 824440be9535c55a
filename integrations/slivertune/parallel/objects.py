"""Preparation of the objects of `slivertune.prepare` around a model that its layout has already prepared."""

from typing import Any

from torch import nn

from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import mark_prepared, mark_while_attached
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.consistency.explain import explain_saving
from slivertune.parallel.layout import layout_of


def prepare_rest(
    accelerator: Any, model: nn.Module, placed: Any, optimizer: Sliver, objects: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Prepare the optimizer that steps a model on every rank, and all other objects (loaders, schedulers).

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        placed: The prepared model: the model itself on its device (DDP), or the sharded model (FSDP2).
        optimizer: Optimizer built over the model; the method averages its gradients.
        objects: All objects to prepare, including the model and the optimizer.

    Returns:
        The prepared objects in the same order; the optimizer is in accelerate's wrapper.
    """
    # Prepared before the others, so that schedulers find it.
    wrapped = accelerator.prepare_optimizer(optimizer)
    mark_prepared(wrapped, placed)
    if layout_of(accelerator) == "ddp":
        mark_while_attached(placed, optimizer)
    explain_saving(accelerator)
    keep_sidecar(accelerator, optimizer)
    prepared = {id(model): placed, id(optimizer): wrapped}
    rest = [each for each in objects if id(each) not in prepared]
    others = accelerator.prepare(*rest) if rest else ()
    following = iter(others if len(rest) > 1 else (others,))
    return tuple(prepared[id(each)] if id(each) in prepared else next(following) for each in objects)
