"""Running statistics of normalization layers, which each rank computes from its own rows.

DistributedDataParallel sends them from rank 0 before each forward pass. Here they are sent after each step, when all
ranks are known to be there, so that evaluation and checkpoints find the same values on every rank, too.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from slivertune.core.layout import world_size
from slivertune.parallel.consistency.heartbeat import guard


def statistics_sync(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Make a function that replaces all ranks' running statistics by those of rank 0.

    Args:
        model: The model; layers with `track_running_stats`, such as batch norms, have statistics.
        device: Device of the communication.

    Returns:
        The function. Calling it is a collective, unless no layer has statistics.
    """
    layers = [each for each in model.modules() if getattr(each, "track_running_stats", False)]

    def send() -> None:
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            _send([buffer for buffer in buffers if buffer.dtype == dtype], device)

    return send if world_size() > 1 else lambda: None


@torch.no_grad()
def _send(buffers: list[torch.Tensor], device: torch.device) -> None:
    flat = torch.cat([buffer.reshape(-1).to(device) for buffer in buffers])
    with guard("sending the running statistics of rank 0"):
        dist.broadcast(flat, src=0)
    for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        # Past autograd's check: the graph of a forward before the step names them, and its backward does not read them.
        buffer.data.copy_(values.view(buffer.shape))
