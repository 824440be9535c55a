"""HiFT on ranks that each hold the whole model (DDP), without the buckets of DistributedDataParallel.

DistributedDataParallel decides when it wraps a model what has gradients, and keeps buckets as large as all of it. Here
the gradients of the active group alone are averaged, by hooks (`BucketedAllReduce`), so a rank holds what one process
does and two buckets. Buffers (running means of a batch norm, say) are sent from rank 0 once, when training is prepared.
"""

from typing import Any

from torch import nn

from slivertune.hift import HiFT
from slivertune.parallel.consistency.explain import compare_when_saving
from slivertune.parallel.consistency.headers import Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.consistency.hift import ConsistencyCheck
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce, broadcast_from_first
from slivertune.parallel.objects import prepare_rest


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
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    share_hift(model, hift, accelerator)
    return prepare_rest(accelerator, model, placed, hift, objects)


def share_hift(model: nn.Module, hift: HiFT, accelerator: Any = None) -> None:
    """Let HiFT step on every rank from the averaged gradients; weights and buffers are made those of rank 0.

    Args:
        model: On its device.
        hift: Built over the model.
        accelerator: Says which micro-batch is an update's last; without one every backward pass is averaged.
    """
    heartbeat = Heartbeat("hift")
    broadcast_from_first(model, hift.trained_weights[0].device, hift.waiting_weight)
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
