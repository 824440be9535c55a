"""SFT on ranks that each hold the whole model (DDP), without DistributedDataParallel."""

from typing import Any

from torch import nn

from slivertune.parallel.consistency.explain import compare_when_saving
from slivertune.parallel.ddp.gradient_sync import broadcast_from_first
from slivertune.parallel.ddp.running_statistics import statistics_sync
from slivertune.parallel.objects import prepare_rest
from slivertune.parallel.sft.communicator import RankCommunicator
from slivertune.sft import SFT


def prepare(accelerator: Any, model: nn.Module, sft: SFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare under plain DDP: the model is not wrapped, and its weights and buffers are copied from rank 0.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        sft: SFT built over the model.
        objects: All objects to prepare, including the model and SFT.

    Returns:
        The prepared objects in the same order; the optimizer is in accelerate's wrapper.

    Raises:
        ValueError: If the settings differ between ranks.
    """
    communicator = RankCommunicator(lambda: bool(accelerator.sync_gradients))
    with sft.rebinding_parameters(communicator):
        placed = accelerator.prepare_model(model, evaluation_mode=True)
        broadcast_from_first(model, accelerator.device)
    communicator.keep_together(sft)
    send_statistics = statistics_sync(model, accelerator.device)
    sft.register_step_post_hook(lambda optimizer, args, kwargs: send_statistics())
    prepared = prepare_rest(accelerator, model, placed, sft, objects)
    compare_when_saving(accelerator, sft, communicator.compare_all)
    return prepared
