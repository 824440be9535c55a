"""Optimizers that a plan knows by name, as `slivertune train` builds them on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from slivertune.core.ledger import MemoryTier, claim, claimed_at_birth
from slivertune.core.missing_library import missing_library
from slivertune.core.suggestions import did_you_mean
from slivertune.planning.kernels import Kernels

OptimizerName = Literal[
    "adamw", "sgd_momentum", "sgd", "adafactor", "adagrad", "adamw8bit", "paged_adamw", "paged_adamw8bit"
]

OPTIM_NAMES: dict[str, OptimizerName] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adagrad": "adagrad",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "paged_adamw_32bit": "paged_adamw",
    "paged_adamw_8bit": "paged_adamw8bit",
}
"""Names of `transformers.TrainingArguments.optim` that a plan knows."""

PAGED: frozenset[OptimizerName] = frozenset({"paged_adamw", "paged_adamw8bit"})
"""Optimizers whose state lies in unified memory: the driver moves pages of it to the GPU when an update needs them."""

_without_trainer: list[None] = []
_LEARNING_RATE = 1e-4
_FEWEST_PAGED = 100_000
"""Elements from which bitsandbytes pages a buffer."""


def optimizer_named(optim: str, optim_args: str) -> OptimizerName:
    """Return the plan's optimizer for a `TrainingArguments.optim`.

    Args:
        optim: Value of `TrainingArguments.optim`.
        optim_args: Value of `TrainingArguments.optim_args`.

    Raises:
        ValueError: If a plan does not know it.
    """
    if optim not in OPTIM_NAMES:
        meant = did_you_mean(optim, OPTIM_NAMES)
        raise ValueError(f"a plan does not know --optim {optim}: it must be one of {', '.join(OPTIM_NAMES)}{meant}")
    return "sgd_momentum" if optim == "sgd" and "momentum=" in optim_args else OPTIM_NAMES[optim]


def optimizer_of(name: OptimizerName, kernels: Kernels = "gpu") -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the arguments that an optimizer's name stands for.

    AdamW is fused, as in the Trainer. SGD and Adagrad have the temporaries of torch's GPU path, which updates all
    tensors of a call together (`foreach`). On the CPU they update one tensor after the other.

    Args:
        name: Name of the optimizer.
        kernels: Device on which it steps.

    Returns:
        The class, and keyword arguments of its constructor.
    """
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, {"lr": _LEARNING_RATE, "scale_parameter": False, "relative_step": False}
    if name == "adamw8bit":
        return _bitsandbytes(name, "AdamW8bit"), {"lr": _LEARNING_RATE}
    if name in PAGED:
        kind = _bitsandbytes(name, "AdamW8bit" if "8bit" in name else "AdamW")
        return kind if kernels == "cpu" else _paged(kind), {"lr": _LEARNING_RATE}
    if name == "adamw":
        return torch.optim.AdamW, {"lr": _LEARNING_RATE, "fused": True}
    if name == "adagrad":
        return torch.optim.Adagrad, {"lr": _LEARNING_RATE, "foreach": kernels == "gpu"}
    momentum = 0.9 if name == "sgd_momentum" else 0.0
    return torch.optim.SGD, {"lr": _LEARNING_RATE, "momentum": momentum, "foreach": kernels == "gpu"}


@contextmanager
def without_trainer() -> Iterator[None]:
    """Plan optimizers as in scripts without transformers' Trainer: 8-bit state for embeddings, too."""
    _without_trainer.append(None)
    try:
        yield
    finally:
        _without_trainer.pop()


def trainer_overrides(model: nn.Module, name: OptimizerName) -> dict[int, dict[str, Any]]:
    """Return what transformers' Trainer asks of bitsandbytes' 8-bit optimizers: state in 32 bits for embeddings.

    Args:
        model: The model.
        name: Name of the optimizer.

    Returns:
        Overrides by the id of the parameter, as bitsandbytes takes them. Empty for other optimizers, and inside
        `without_trainer`.
    """
    if "8bit" not in name or _without_trainer:
        return {}
    return {id(each.weight): {"optim_bits": 32} for each in model.modules() if isinstance(each, nn.Embedding)}


@contextmanager
def with_trainer_overrides(model: nn.Module, name: OptimizerName) -> Iterator[None]:
    """Register the overrides of `trainer_overrides` with bitsandbytes, where HiFT finds them, inside this context.

    Args:
        model: The model.
        name: Name of the optimizer.

    Raises:
        ImportError: If bitsandbytes is needed, and missing.
    """
    overrides = trainer_overrides(model, name)
    if not overrides:
        yield
        return
    _bitsandbytes(name, "AdamW8bit")
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    registered: Any = GlobalOptimManager.get_instance().pid2config  # type: ignore[no-untyped-call]
    registered.update(overrides)
    try:
        yield
    finally:
        for parameter_id in overrides:
            registered.pop(parameter_id, None)


def _bitsandbytes(name: OptimizerName, kind: str) -> type[torch.optim.Optimizer]:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(missing_library(f"optimizer={name!r}", "bitsandbytes", "take another optimizer")) from error
    found: type[torch.optim.Optimizer] = getattr(bitsandbytes.optim, kind)
    return found


def _paged(kind: Any) -> type[torch.optim.Optimizer]:
    """Return the class with large buffers in host memory. bitsandbytes' own pages need a GPU."""

    class Paged(kind):  # type: ignore[misc]
        def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            tier: MemoryTier = "host" if p.numel() >= _FEWEST_PAGED else "device"
            with claimed_at_birth("state", tier):
                buffer: torch.Tensor = super().get_state_buffer(p, dtype=dtype)
            claim(buffer, "state", tier)
            return buffer

    return Paged
