"""Weights in 4 bits (bitsandbytes NF4 with double quantisation), as QLoRA freezes them (Dettmers et al., 2023)."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, Trainer

from slivertune.core.layers import find_layers
from slivertune.training.precision import Precision


def four_bit_options(
    model_class: Any, config: PreTrainedConfig, precision: Precision, device: torch.device
) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise the linear layers of a model's blocks, and nothing else.

    Embeddings and heads, a classifier's among them, stay as they are: they are a small part of a large model, and a new
    head is trained.

    Args:
        model_class: One of the library's Auto classes.
        config: The model's configuration.
        precision: Decides what quantised weights are multiplied in: bf16 under bf16 autocast, else fp32.
        device: Where the model goes; weights are quantised there.

    Returns:
        Keyword arguments.

    Raises:
        ValueError: If the model's blocks can't be found.
    """
    return {
        "quantization_config": BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if precision.autocast == "bf16" else torch.float32,
            llm_int8_skip_modules=_modules_outside_blocks(model_class, config),
        ),
        "device_map": {"": device},
    }


def prepare_four_bit(model: PreTrainedModel) -> None:
    """Make a model with 4-bit weights fit to train adapters beside them.

    Norms are held in fp32, as QLoRA holds them: they scale all that passes, and take next to no memory. Weights keep
    the layout in which they have a backward: on CPUs with AVX512-BF16, bitsandbytes 0.50 changes it in the first
    evaluation, and rounds the scales on the way; from then on no gradient passes.

    Args:
        model: Its modules without children whose parameters are all vectors are its norms.
    """
    from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
        parameters = list(module.parameters(recurse=False))
        if parameters and not list(module.children()) and all(parameter.ndim == 1 for parameter in parameters):
            module.float()


@contextmanager
def admitted_by_trainer(model: Any) -> Iterator[None]:
    """Let a Trainer be made for a model with 4-bit weights inside, though it has no adapters of PEFT.

    The Trainer refuses quantised models without PEFT, and asks for the mark on the model, once, when it is made. What
    trains beside the codes without PEFT takes the mark off for that time.

    Args:
        model: The model; its mark is back afterwards.
    """
    model.is_quantized = False
    try:
        yield
    finally:
        model.is_quantized = True


class SilenceAboutCodes(logging.Filter):
    """Keeps a Trainer that resumes from naming every quantisation state of the checkpoint as unexpected.

    The codes never change, and the model has their states already, outside of what torch loads. Works from `begin` to
    `end`.
    """

    def begin(self) -> None:
        """Drop the warning from here on."""
        logging.getLogger(Trainer.__module__).addFilter(self)

    def end(self) -> None:
        """Let all warnings pass again; harmless before `begin`."""
        logging.getLogger(Trainer.__module__).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record passes."""
        message = record.getMessage()
        return not (message.startswith("There were unexpected keys in the checkpoint") and ".quant_state." in message)


def num_weights(parameter: nn.Parameter) -> int:
    """How many weights a parameter has; a quantised one holds several in an element, a sharded one may hold none."""
    quantised = getattr(parameter, "quant_state", None)
    if quantised is not None:
        return math.prod(quantised.shape)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _modules_outside_blocks(model_class: Any, config: PreTrainedConfig) -> list[str]:
    """Patterns of the linear layers that are not to be quantised, each of one path alone."""
    with torch.device("meta"):
        model: nn.Module = model_class.from_config(copy.deepcopy(config))
    in_blocks = {name for layer in find_layers(model) if layer.kind == "block" for name in layer.parameter_names}
    return [
        f"^{re.escape(path)}$"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and in_blocks.isdisjoint(f"{path}.{name}" for name, _ in module.named_parameters())
    ]
