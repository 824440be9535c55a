"""HiFT on ranks that each hold the whole model (DDP), without the buckets of DistributedDataParallel.

DistributedDataParallel decides when it wraps a model what has gradients, and keeps buckets as large as all of it. Here
the gradients of the active group alone are averaged, by hooks (`BucketedAllReduce`), so a rank holds what one process
does and two buckets. Buffers (running means of a batch norm, say) are sent from rank 0 once, when training is prepared.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slivertune.hift import HiFT
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.consistency.explain import compare_when_saving, explain_saving
from slivertune.parallel.consistency.headers import Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat, guard, world_size
from slivertune.parallel.consistency.hift import ConsistencyCheck
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.parallel.objects import replace_each


def prepare(accelerator: Any, model: nn.Module, hift: HiFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare a model, the HiFT that was built over it, loaders and schedulers.

    Args:
        accelerator: `accelerate.Accelerator` under plain DDP.
        model: The model.
        hift: Built over it.
        objects: As for `accelerator.prepare`.

    Returns:
        The prepared objects in the same order. The model is not wrapped; the optimizer is accelerate's wrapper of HiFT.

    Raises:
        ValueError: If the ranks were given other settings or other models.
    """
    prepared_model = accelerator.prepare_model(model, evaluation_mode=True)
    share_hift(model, hift, accelerator)
    optimizer = accelerator.prepare_optimizer(hift)
    optimizer._is_accelerate_prepared = prepared_model._is_accelerate_prepared = True
    explain_saving(accelerator)
    keep_sidecar(accelerator, hift)
    return replace_each(accelerator, objects, {id(model): prepared_model, id(hift): optimizer})


def share_hift(model: nn.Module, hift: HiFT, accelerator: Any = None) -> None:
    """Let HiFT step on every rank from the averaged gradients; weights and buffers are made those of rank 0.

    Args:
        model: On its device.
        hift: Built over the model.
        accelerator: Says which micro-batch is an update's last; without one every backward pass is averaged.
    """
    heartbeat = Heartbeat("hift")
    broadcast_from_first(model)
    hift.use_sidecar("DDP")
    consistency = ConsistencyCheck(hift, heartbeat, with_weights=True)
    communicator = BucketedAllReduce(
        model,
        [weight.trained for weight in hift.trained_weights],
        heartbeat,
        is_due=lambda: not hift.is_detached and (accelerator is None or bool(accelerator.sync_gradients)),
        meet=lambda: consistency.meet(Stage.GRADIENT_SYNC),
    )
    hift.listen_to_backward(communicator.begin_backward)
    if accelerator is not None:
        compare_when_saving(accelerator, consistency.compare)


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
