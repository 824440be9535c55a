"""The modules that get a LoRA adapter, as PEFT's `LoraConfig` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"
"""PEFT's shorthand for every linear layer but the head."""
_MAMBA_TYPES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_READ_BY_KERNELS = ("conv1d", "out_proj")
"""Modules of Mamba whose weights its kernels read directly, past an adapter. PEFT refuses them in models of these types
(`_check_lora_target_modules_mamba`)."""


def adapter_targets(names: Sequence[str] | None, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `LoraConfig` that choose its modules.

    Args:
        names: Names of modules. None, or `all-linear` alone, is every linear layer that can have an adapter.
        model: Model that gets the adapters.

    Returns:
        `target_modules`, and `exclude_modules` (None if no linear layer is left out).
    """
    if names is not None and list(names) != [ALL_LINEAR]:
        return {"target_modules": list(names), "exclude_modules": None}
    is_mamba = getattr(getattr(model, "config", None), "model_type", None) in _MAMBA_TYPES
    return {"target_modules": ALL_LINEAR, "exclude_modules": list(_READ_BY_KERNELS) if is_mamba else None}
