"""HiFT on ranks that each hold the whole model (DDP), without the buckets of DistributedDataParallel.

DistributedDataParallel fixes which parameters have gradients when it wraps a model, and its buckets are as large as
the model. Here, hooks average only the active group's gradients (`BucketedAllReduce`), so a rank needs the memory of
one process and two buckets. Parameters that HiFT does not train, and another optimizer may, are averaged while they
require a gradient. Running statistics are those of rank 0 after each step, other buffers at preparation.
"""

import weakref
from typing import Any

from torch import nn

from slivertune.hift import HiFT
from slivertune.parallel.consistency.explain import compare_when_saving
from slivertune.parallel.consistency.headers import Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.consistency.hift import ConsistencyCheck
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce, broadcast_from_first
from slivertune.parallel.ddp.running_statistics import statistics_sync
from slivertune.parallel.objects import prepare_rest


def prepare(accelerator: Any, model: nn.Module, hift: HiFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare a model, the HiFT that was built over it, loaders and schedulers.

    Args:
        accelerator: `accelerate.Accelerator` under plain DDP.
        model: The model.
        hift: HiFT built over the model.
        objects: As for `accelerator.prepare`.

    Returns:
        The prepared objects in the same order. The model is not wrapped; the optimizer is in accelerate's wrapper.

    Raises:
        ValueError: If the settings or models differ between ranks.
    """
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    share_hift(model, hift, accelerator)
    return prepare_rest(accelerator, model, placed, hift, objects)


def share_hift(model: nn.Module, hift: HiFT, accelerator: Any = None) -> None:
    """Let HiFT step on every rank with averaged gradients. Weights and buffers are copied from rank 0.

    Args:
        model: The model on its device.
        hift: HiFT built over the model.
        accelerator: Accelerator that marks an update's last micro-batch; None averages after every backward pass.
    """
    heartbeat = Heartbeat("hift")
    device = hift.trained_weights[0].device
    broadcast_from_first(model, device)
    hift.use_sidecar("DDP")
    consistency = ConsistencyCheck(
        hift,
        heartbeat,
        with_weights=True,
        has_own=lambda: communicator.has_own,
        after_step=statistics_sync(model, device),
    )
    # The model's hooks keep neither alive: HiFT comes off the model when the user drops it.
    held, checked = weakref.ref(hift), weakref.proxy(consistency)

    def is_due() -> bool:
        own = held()
        if own is None or own.is_detached:
            return False
        return accelerator is None or bool(accelerator.sync_gradients)

    trained = [weight.trained for weight in hift.trained_weights]
    known = set(trained)
    # Frozen or not by now: another optimizer may train them. Last in the backward, so that no group waits for them.
    others = [each for each in model.parameters() if each not in known and each.is_floating_point()]
    communicator = BucketedAllReduce(
        model,
        [*others, *trained],
        heartbeat,
        is_due=is_due,
        meet=lambda: checked.meet(Stage.GRADIENT_SYNC),
        on_mean=hift.turns.route.wait_for_means(),
    )
    hift.turns.listen_to_backward(communicator.begin_backward)
    weakref.finalize(hift, communicator.remove).atexit = False
    if accelerator is not None:
        compare_when_saving(accelerator, hift, consistency.compare)
