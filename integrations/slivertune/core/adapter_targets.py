"""The modules that get a LoRA adapter, as PEFT's `LoraConfig` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"
"""PEFT's shorthand for every linear layer but the head."""
_OF_MAMBA_2 = ("conv1d", "out_proj")
_OF_MAMBA_1 = (*_OF_MAMBA_2, "dt_proj", "x_proj")
_READ_DIRECTLY = {
    **dict.fromkeys(("falcon_mamba", "mamba"), _OF_MAMBA_1),
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), _OF_MAMBA_2),
}
"""By type of model: modules whose weights the mixer or its kernels read past an adapter, which would not train. PEFT
refuses conv1d and out_proj in these (`_check_lora_target_modules_mamba`)."""


def target_modules(names: Sequence[str] | None) -> list[str] | str:
    """Return names of modules as PEFT takes them: a list, or its shorthand `all-linear`, which must be a string.

    Args:
        names: Names of modules. None is the shorthand.
    """
    return ALL_LINEAR if names is None or list(names) == [ALL_LINEAR] else list(names)


def adapter_targets(names: Sequence[str] | None, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `LoraConfig` that choose its modules.

    Args:
        names: Names of modules. None, or `all-linear` alone, is every linear layer that can have an adapter.
        model: Model that gets the adapters.

    Returns:
        `target_modules`, and `exclude_modules` (None if no linear layer is left out).
    """
    targets = target_modules(names)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    left_out = _READ_DIRECTLY.get(kind, ()) if targets == ALL_LINEAR and isinstance(kind, str) else ()
    return {"target_modules": targets, "exclude_modules": list(left_out) or None}
