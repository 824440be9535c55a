"""`slivertune.prepare`, which replaces `accelerator.prepare` on one device or many."""

from typing import Any

from torch import nn

from slivertune.core.sliver import CheckpointedSliver, Sliver
from slivertune.parallel.adapters import adapter_of, check_before, note_prepared
from slivertune.parallel.checkpoint.manifests import seal_states
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.consistency.heartbeat import check_agreement
from slivertune.parallel.layout import layout_of
from slivertune.parked.park import refuse_parked


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Prepare a model, its optimizer, loaders and schedulers for the Accelerator's layout.

    With HiFT or SFT, every layout (DDP, FSDP2, ZeRO-1, 2 and 3) makes the updates that one process would make on
    the whole batch. On one device, and for any other optimizer, this calls `accelerator.prepare`. Call it once on every
    rank, with all objects, before the first step.

    Args:
        accelerator: `accelerate.Accelerator`.
        *objects: As for `accelerator.prepare`: a model, the optimizer built over it, loaders, schedulers.

    Returns:
        The prepared objects in the same order; a single object is returned by itself.

    Raises:
        ValueError: If there are several models, an optimizer without its model, settings that differ between ranks,
            or a layout that does not support the method; says what to use.
        RuntimeError: If the optimizer has already stepped, or was sharded or put into an engine by an earlier call.

    Example:
        >>> model, optimizer, loader, scheduler = slivertune.prepare(accelerator, model, optimizer, loader, scheduler)
    """
    slivers = [each for each in objects if isinstance(each, Sliver)]
    layout = layout_of(accelerator) if slivers else "single"
    if layout == "single":
        if slivers:
            seal_states(accelerator)
        for each in slivers:
            if isinstance(each, CheckpointedSliver) and each.has_own_files:
                each.use_sidecar()
            keep_sidecar(accelerator, each)  # also lets one device read a checkpoint of several ranks
        return accelerator.prepare(*objects)
    models = [each for each in objects if isinstance(each, nn.Module)]
    if len(models) != 1 or len(slivers) != 1:
        raise ValueError(
            f"{len(models)} models and {len(slivers)} slivertune optimizers were passed. Under {layout}, prepare one "
            "model together with the one optimizer that was built over it"
        )
    optimizer = slivers[0]
    adapter = adapter_of(optimizer, layout)
    check_before(optimizer, models[0], layout)
    if layout != "ddp":
        refuse_parked(models[0], f"prepare the model for {layout}")
    check_agreement(optimizer.facts())
    seal_states(accelerator)
    prepared = adapter.prepare(accelerator, models[0], optimizer, objects)
    note_prepared(optimizer, layout)
    return prepared
