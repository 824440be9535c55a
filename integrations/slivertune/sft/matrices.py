"""Which parameters of a module are the weights of matrix products: linear layers, experts, other stacks. Pure."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product: `nn.Linear` and what derives from it, or transformers' Conv1D."""
    pytorch_utils: Any = sys.modules.get("transformers.pytorch_utils")
    classes: tuple[type, ...] = (nn.Linear,) if pytorch_utils is None else (nn.Linear, pytorch_utils.Conv1D)
    return isinstance(module, classes)


def matrices_of(module: nn.Module) -> dict[str, int]:
    """Find the parameters that a module itself, without those inside it, multiplies its inputs by.

    * the weight of a linear layer, and the input projections of `nn.MultiheadAttention`;
    * experts: in a module that knows its number of experts, parameters of three dimensions that begin with it, and in
      a class of experts those of two dimensions whose rows are a multiple of it (DBRX);
    * other parameters of three dimensions, such as XLNet's projections, unless one extent is 1 or the module is one of
      torch's own (a convolution is no linear layer).

    Biases, norms, tables and routers, which have one row an expert, are none of these.

    Args:
        module: Any module.

    Returns:
        For each attribute the number of experts' matrices that it stacks, 1 where it stacks none.
    """
    if is_linear(module):
        return {"weight": 1} if isinstance(getattr(module, "weight", None), nn.Parameter) else {}
    own = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in module.named_parameters(recurse=False)}
    if isinstance(module, nn.MultiheadAttention):
        return {name: 1 for name in own if name in _ATTENTION_WEIGHTS}
    if _is_torchs(module):
        return {}
    num_experts = _num_experts(module)
    stacked = {name: _num_stacked(module, shape, num_experts) for name, shape in own.items()}
    return {name: count for name, count in stacked.items() if count}


def _num_stacked(module: nn.Module, shape: tuple[int, ...], num_experts: set[int]) -> int:
    """Experts in a parameter; 1 if it is a matrix of no expert's, 0 if it is no matrix."""
    if len(shape) == 3 and shape[0] in num_experts:
        return shape[0]
    if len(shape) == 3:
        return int(min(shape) > 1)
    if len(shape) == 2 and "expert" in type(module).__name__.lower():
        return max((count for count in num_experts if shape[0] > count and shape[0] % count == 0), default=0)
    return 0


def _num_experts(module: nn.Module) -> set[int]:
    values = {value for name, value in vars(module).items() if "experts" in name and type(value) is int}
    return {value for value in values if value > 0}


def _is_torchs(module: nn.Module) -> bool:
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    return any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds)
