"""Casts of an adapter's input that autocast makes needless.

PEFT casts the input of a LoRA adapter to the adapter's dtype, fp32 beside weights in bf16. Autocast then casts it back
for the product, and that copy is kept for the backward, one for every adapter. Left as it is, the input goes into the
product itself: adapters that share it (queries, keys and values) keep it once. Both casts are exact, so results and
gradients are the same to the bit.
"""

from typing import Any

import torch
from torch import nn

from slivertune.core.module_hook import ModelHandle, ModuleHook


def skip_needless_casts(model: nn.Module) -> "AdapterCastsHandle":
    """Let a PEFT model's LoRA adapters take their inputs as they are while autocast casts them anyway.

    Asked before each forward: where autocast is off, as in `generate` outside of it, PEFT casts as ever. It also does
    for adapters with dropout, whose noise in bf16 is not that in fp32, for those of layers other than linear ones, and
    for variants of LoRA.

    Args:
        model: A PEFT model; one without LoRA adapters stays as it is.

    Returns:
        Takes it off again; also a context manager.
    """
    return AdapterCastsHandle(model)


class AdapterCastsHandle(ModelHandle):
    """A model whose adapters skip needless casts; also a context manager, which ends that at its end.

    Args:
        model: A PEFT model.
    """

    refusal_to_copy = (
        "an AdapterCastsHandle belongs to one model and is neither copied nor pickled; a copy of the model casts as "
        "PEFT does: call skip_needless_casts on it"
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer

        layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self._layers = [layer for layer in layers if _has_plain_products(layer)]
        own = [layer.cast_input_dtype_enabled for layer in self._layers]
        self._undo.append(lambda: self._set(own))
        if not isinstance(model, PeftModel):
            return
        # Training's forward passes through PEFT's model, within which autocast begins, and generation's does not.
        for module in (model.base_model, model.get_base_model()):
            self._undo.append(module.register_forward_pre_hook(ModuleHook(self._before_forward)).remove)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        device = next(module.parameters()).device
        self._set([not torch.is_autocast_enabled(device.type)] * len(self._layers))

    def _set(self, values: list[bool]) -> None:
        for layer, value in zip(self._layers, values, strict=True):
            layer.cast_input_dtype_enabled = value


def _has_plain_products(layer: Any) -> bool:
    """Whether all that a LoRA layer does with its input are products that autocast casts."""
    return (
        all(isinstance(each, nn.Linear) for each in layer.lora_A.values())
        and all(isinstance(each, nn.Identity) for each in layer.lora_dropout.values())
        and not layer.lora_variant
    )
