"""SFT on ranks that each hold the whole model (DDP), without DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch import nn

from slivertune.parallel.consistency.explain import compare_when_saving, explain_saving
from slivertune.parallel.ddp.hift import broadcast_from_first
from slivertune.parallel.objects import replace_each
from slivertune.parallel.sft.communicator import RankCommunicator
from slivertune.sft import SFT


def prepare(accelerator: Any, model: nn.Module, sft: SFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare under plain DDP: the model is not wrapped, and its weights and buffers are made those of rank 0.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        sft: Built over it.
        objects: All that is to be prepared, these two included.

    Returns:
        The prepared objects in the same order; the optimizer is accelerate's wrapper of SFT.

    Raises:
        ValueError: If the ranks were given other settings.
    """
    communicator = RankCommunicator(lambda: bool(accelerator.sync_gradients))
    with sft.rebinding_parameters(communicator):
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        broadcast_from_first(model)
    communicator.keep_together(sft)
    explain_saving(accelerator)
    compare_when_saving(accelerator, lambda: communicator.compare_all(sft))
    optimizer = accelerator.prepare_optimizer(sft)
    optimizer._is_accelerate_prepared = prepared._is_accelerate_prepared = True
    return replace_each(accelerator, objects, {id(model): prepared, id(sft): optimizer})
