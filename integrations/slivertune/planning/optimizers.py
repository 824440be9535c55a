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

IN_8_BITS: frozenset[OptimizerName] = frozenset({"adamw8bit", "paged_adamw8bit"})
"""Optimizers of bitsandbytes whose state has 8 bits, but for small tensors and embeddings."""

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
def embeddings_in_32_bits(model: nn.Module, name: OptimizerName) -> Iterator[None]:
    """Let bitsandbytes keep the state of embeddings in 32 bits, as the Trainer does for its 8-bit optimizers.

    The overrides of the process, which bitsandbytes reads, are replaced inside this context.

    Args:
        model: Model whose optimizer makes its state inside this context.
        name: Name of the optimizer, one of `IN_8_BITS`.

    Raises:
        ImportError: If bitsandbytes is missing.
    """
    _bitsandbytes(name, "AdamW8bit")
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    manager: Any = GlobalOptimManager.get_instance()  # type: ignore[no-untyped-call]
    kept = {name: vars(manager)[name] for name in ("pid2config", "index2config", "module_weight_config_triple")}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    manager.pid2config, manager.index2config = {}, {}
    manager.module_weight_config_triple = [(module, "weight", {"optim_bits": 32}) for module in embeddings]
    try:
        yield
    finally:
        vars(manager).update(kept)


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
