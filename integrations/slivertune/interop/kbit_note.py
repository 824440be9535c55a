"""Line on the cost of fp32 weights beside 4-bit ones, as PEFT's `prepare_model_for_kbit_training` leaves them."""

import torch
from torch import nn

from slivertune.core.byte_text import format_bytes
from slivertune.sft.targets import is_4bit


def cost_of_fp32(model: nn.Module) -> str | None:
    """Describe what a model pays for frozen weights in fp32 beside 4-bit weights.

    Args:
        model: Model, with or without adapters.

    Returns:
        One line. None if no weight is in 4 bits, or no frozen one beside them in fp32.
    """
    parameters = list(model.parameters())
    frozen = [each for each in parameters if each.dtype == torch.float32 and not each.requires_grad]
    if not frozen or not any(map(is_4bit, parameters)):
        return None
    num_bytes = sum(each.nbytes for each in frozen)
    return (
        f"frozen weights beside the 4-bit ones are in fp32 and take {format_bytes(num_bytes)}, twice as much as in 16 "
        "bits; the blocks' inputs and the logits are then fp32, too. To avoid this, leave out PEFT's "
        "prepare_model_for_kbit_training. slivertune plan shows the difference by its option --recipe peft-kbit"
    )
