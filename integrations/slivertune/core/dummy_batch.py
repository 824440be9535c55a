"""Batches of zeros on which a model, or a tower of one, runs."""

import inspect
from typing import Any

import torch
from torch import nn


def dummy_batch(module: nn.Module) -> dict[str, torch.Tensor]:
    """Make a batch of zeros that most models run on: one sequence of eight ids, one image, or one sound.

    Args:
        module: The model. Models of transformers name the input that they need.
    """
    arguments = inspect.signature(module.forward).parameters
    name: str = getattr(module, "main_input_name", "")
    if name not in arguments:  # a tower may name its whole model's input, which it does not take
        name = next(iter(arguments))
    ids = torch.zeros(1, 8, dtype=torch.long)
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    config: Any = getattr(module, "config", None)
    if "grid_thw" in arguments:
        side = 2 * getattr(config, "spatial_merge_size", 1)
        return {name: _patches(module, side**2, dtype), "grid_thw": torch.tensor([[1, side, side]])}
    if "spatial_shapes" in arguments:
        mask = torch.ones(1, 16, dtype=torch.long)
        return {
            name: _patches(module, 16, dtype)[None],
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[4, 4]]),
        }
    batch = {name: ids}
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        batch[name] = torch.zeros(1, getattr(config, "num_channels", 3), height, width, dtype=dtype)
    elif name == "input_features":
        batch[name] = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
    elif name == "input_values":
        batch[name] = torch.zeros(1, 4000, dtype=dtype)
    if "decoder_input_ids" in arguments:
        batch["decoder_input_ids"] = ids
    return batch


def _patches(module: nn.Module, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Make patches of an image, as long as a tower's first layer takes them. Shape (number, elements)."""
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    weight = next((each for each in weights if each.dim() == 5), weights[0])  # a convolution over space and time
    return torch.zeros(number, weight[0].numel(), dtype=dtype)
