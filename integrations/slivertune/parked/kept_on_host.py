"""Blocks that stay in host memory while the rest of a model moves to a device, before they are streamed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slivertune.core.layers import find_blocks
from slivertune.core.module_hook import ModelHandle, StandIn, put_stand_in
from slivertune.core.torch_internals import apply_of


class BlocksOnHost(ModelHandle):
    """Handle that keeps a model's blocks in host memory, made by `keep_blocks_on_host`.

    Args:
        model: Model in host memory.
    """

    refusal_to_copy = "a handle belongs to one model. A copy of the model moves to a device as a whole"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for _, block in find_blocks(model):
            self.on_remove(put_stand_in(block, "_apply", _StaysOnHost(apply_of(block))))


def keep_blocks_on_host(model: nn.Module) -> BlocksOnHost:
    """Keep the blocks on the host in `model.to(device)`, which moves all else. Casts of blocks are made on the host.

    Args:
        model: Model in host memory.

    Returns:
        Handle. After `remove()` the model moves as any other.

    Raises:
        ValueError: If the model has no blocks, or one is on a device already.
    """
    for path, block in find_blocks(model):
        for name, parameter in block.named_parameters():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"{path}.{name} is on {parameter.device} already, where all blocks fit. Park the model before "
                    "it is moved, or leave its weights on the device"
                )
    return BlocksOnHost(model)


class _StaysOnHost(StandIn):
    """`_apply` of a block, which `to` and similar methods call for each module of a model."""

    def __call__(self, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def change_dtype(tensor: torch.Tensor) -> torch.Tensor:
            form = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            changed = change(form)
            return change(tensor) if changed.device == form.device else tensor.to(changed.dtype)

        return self.function(change_dtype, recurse)
