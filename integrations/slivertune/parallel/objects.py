"""What was passed to `slivertune.prepare`, put together again around a model and the optimizer that steps it."""

from typing import Any

from torch import nn

from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import mark_prepared
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.consistency.explain import explain_saving


def prepare_rest(
    accelerator: Any, model: nn.Module, placed: Any, optimizer: Sliver, objects: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Prepare the optimizer that steps a model on every rank, and all else (loaders, schedulers).

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        placed: What takes its place: the model itself on its device (DDP), or the sharded one (FSDP2).
        optimizer: Built over it; the method averages its gradients.
        objects: All that is to be prepared, these two included.

    Returns:
        The prepared objects in the same order; the optimizer is accelerate's wrapper of it.
    """
    # Before the others, so that schedulers find it.
    wrapped = accelerator.prepare_optimizer(optimizer)
    mark_prepared(wrapped, placed)
    explain_saving(accelerator)
    keep_sidecar(accelerator, optimizer)
    prepared = {id(model): placed, id(optimizer): wrapped}
    rest = [each for each in objects if id(each) not in prepared]
    others = accelerator.prepare(*rest) if rest else ()
    following = iter(others if len(rest) > 1 else (others,))
    return tuple(prepared[id(each)] if id(each) in prepared else next(following) for each in objects)
