"""Skip casts of a LoRA adapter's input that autocast makes redundant.

PEFT casts the input of a LoRA adapter to the adapter's dtype: fp32 beside weights in bf16. Autocast then casts it back
for the product, and keeps that copy for the backward, one per adapter. Without PEFT's cast, the input itself goes into
the product, and adapters that share an input (queries, keys and values) keep it once. Both casts are exact, so results
and gradients are the same to the bit.
"""

from typing import Any

import torch
from torch import nn

from slivertune.core.module_hook import ModelHandle, ModuleHook


def skip_needless_casts(model: nn.Module) -> "AdapterCastsHandle":
    """Let a PEFT model's LoRA adapters skip casts of their inputs while autocast casts them anyway.

    Autocast is checked before each forward. If it is off, as in `generate` outside of autocast, PEFT casts as usual.
    PEFT also casts as usual for adapters with dropout, whose noise differs between bf16 and fp32, for adapters of
    layers that are not linear, and for variants of LoRA.

    Args:
        model: A PEFT model. A model without LoRA adapters stays unchanged.

    Returns:
        Handle that restores the casts. Also a context manager.
    """
    return AdapterCastsHandle(model)


class AdapterCastsHandle(ModelHandle):
    """Handle of a model whose adapters skip redundant casts. Also a context manager.

    Args:
        model: A PEFT model.
    """

    refusal_to_copy = (
        "an AdapterCastsHandle belongs to one model and is neither copied nor pickled. A copy of the model casts as "
        "PEFT does. Call skip_needless_casts on it"
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
        # A training forward enters autocast inside PEFT's model. Generation does not pass through PEFT's model.
        for module in (model.base_model, model.get_base_model()):
            self._undo.append(module.register_forward_pre_hook(ModuleHook(self._before_forward)).remove)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        device = next(module.parameters()).device
        self._set([not torch.is_autocast_enabled(device.type)] * len(self._layers))

    def _set(self, values: list[bool]) -> None:
        for layer, value in zip(self._layers, values, strict=True):
            layer.cast_input_dtype_enabled = value


def _has_plain_products(layer: Any) -> bool:
    """Return whether a LoRA layer uses its input only in products that autocast casts."""
    return (
        all(isinstance(each, nn.Linear) for each in layer.lora_A.values())
        and all(isinstance(each, nn.Identity) for each in layer.lora_dropout.values())
        and not layer.lora_variant
    )
