"""Batches on which a model, or a tower of one, runs for the order of its layers alone."""

import inspect
from typing import Any

import torch
from torch import nn

_SIDE = 4
"""Patches along each side of an image. Towers merge two by two of them."""


def dummy_batch(module: nn.Module) -> dict[str, torch.Tensor]:
    """Make a batch that many models run on: one sequence of eight ids, one image, or one sound.

    Args:
        module: The model. Models of transformers name the input that they need.

    Returns:
        Tensors on the CPU by the forward's argument. Floating-point ones are one number, expanded.
    """
    arguments = inspect.signature(module.forward).parameters
    name: str = getattr(module, "main_input_name", "")
    if name not in arguments:  # a tower may name its whole model's input, which it does not take
        name = next(iter(arguments))
    config: Any = getattr(module, "config", None)
    ids = torch.zeros(1, 8, dtype=torch.long, device="cpu")
    batch = {name: ids}
    if "grid_thw" in arguments:
        grid = torch.tensor([[1, _SIDE, _SIDE]], device="cpu")
        batch = {name: _floats(module, _SIDE**2, _patch_elements(module)), "grid_thw": grid}
    elif name == "pixel_values" and "spatial_shapes" in arguments:
        batch = {
            name: _floats(module, 1, _SIDE**2, _patch_elements(module)),
            "pixel_attention_mask": torch.ones(1, _SIDE**2, dtype=torch.long, device="cpu"),
            "spatial_shapes": torch.tensor([[_SIDE, _SIDE]], device="cpu"),
        }
    elif name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        batch[name] = _floats(module, 1, getattr(config, "num_channels", 3), height, width)
    elif name == "input_features":
        batch[name] = _floats(module, 1, config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values":
        batch[name] = _floats(module, 1, 4000)
    if "decoder_input_ids" in arguments:
        batch["decoder_input_ids"] = ids
    return batch


def _floats(module: nn.Module, *shape: int) -> torch.Tensor:
    """Make a tensor of zeros in the memory of one, in the dtype of a module's weights."""
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


def _patch_elements(module: nn.Module) -> int:
    """Return the elements of a patch, as a tower's first layer takes it."""
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    weight = next((each for each in weights if each.dim() == 5), weights[0])  # a convolution over space and time
    return weight[0].numel()
