"""A model that every rank holds whole, and the optimizer that steps it, without DistributedDataParallel."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import mark_prepared
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.consistency.explain import explain_saving
from slivertune.parallel.consistency.heartbeat import guard, world_size
from slivertune.parallel.objects import replace_each


def prepare_rest(
    accelerator: Any, model: nn.Module, placed: Any, optimizer: Sliver, objects: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Prepare the optimizer that steps a model on every rank, and all else.

    Args:
        accelerator: `accelerate.Accelerator` under plain DDP.
        model: The model.
        placed: What `accelerator.prepare_model` made of it with `evaluation_mode`: the model itself, on its device.
        optimizer: Built over it; the method averages its gradients.
        objects: All that is to be prepared, these two included.

    Returns:
        The prepared objects in the same order; the optimizer is accelerate's wrapper of it.
    """
    wrapped = accelerator.prepare_optimizer(optimizer)
    mark_prepared(wrapped, placed)
    explain_saving(accelerator)
    keep_sidecar(accelerator, optimizer)
    return replace_each(accelerator, objects, {id(model): placed, id(optimizer): wrapped})


@torch.no_grad()
def broadcast_from_first(model: nn.Module) -> None:
    """Make every parameter and buffer that of rank 0. A collective.

    Args:
        model: The same on every rank, but for its values.
    """
    if world_size() == 1:
        return
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        contiguous = tensor.detach().contiguous()
        with guard("sending the weights of rank 0"):
            dist.broadcast(contiguous, src=0)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)
