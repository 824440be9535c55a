"""Linear layers in NF4 as fake tensors, since bitsandbytes' own layers need values that a plan does not have.

A weight of n elements takes n / 2 bytes of codes and 1 byte of scale per 64 elements. The scales are quantised again,
with 4 bytes per 256 scales (QLoRA, section 3). A product makes a dense copy of the weight and frees it at its end;
nothing of the copy is saved for the backward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from slivertune.core.layers import modules_in_blocks

_BLOCK = 64
"""Elements of a weight that share a scale."""
_SCALES_BLOCK = 256
"""Scales that share a second-level scale."""
_TABLE_SIZE = 16 + 256 + 1
"""Number of fp32 values in a weight's tables: values of the codes, values of the scales' codes, mean of the scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedState:
    """Parts of bitsandbytes' `quant_state` that decide sizes."""

    shape: tuple[int, ...]
    """Shape of the dense weight."""
    dtype: torch.dtype
    """Dtype of the dense weight."""

    def dense_copy(self, codes: torch.Tensor) -> torch.Tensor:
        """Allocate a dense copy of the weight."""
        return codes.new_empty(self.shape, dtype=self.dtype)


class CodedLinear(nn.Linear):
    """Linear layer with a frozen weight in NF4 with double quantisation, which computes only sizes.

    Args:
        dense: Layer that it replaces.
        compute_dtype: Dtype in which the product is computed.
    """

    compute_type_is_set = True

    def __init__(self, dense: nn.Linear, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        device, num_elements = dense.weight.device, dense.weight.numel()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.compute_dtype = compute_dtype
        codes = torch.empty(math.ceil(num_elements / 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        state = CodedState(shape=tuple(dense.weight.shape), dtype=dense.weight.dtype)
        self.weight.quant_state = state  # type: ignore[attr-defined]
        self.bias = dense.bias
        num_scales = math.ceil(num_elements / _BLOCK)
        self.register_buffer("scales", torch.empty(num_scales, dtype=torch.uint8, device=device))
        self.register_buffer("scales_of_scales", torch.empty(math.ceil(num_scales / _SCALES_BLOCK), device=device))
        self.register_buffer("tables", torch.empty(_TABLE_SIZE, device=device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name for it
        """Compute the product, in the input's dtype.

        Args:
            input: Shape (..., in).
        """
        own_bias: torch.Tensor | None = self.bias
        bias = None if own_bias is None else own_bias.to(self.compute_dtype)
        product: torch.Tensor = _CodedProduct.apply(  # type: ignore[no-untyped-call]
            input.to(self.compute_dtype), self.weight, bias
        )
        return product.to(input.dtype)


class _CodedProduct(torch.autograd.Function):
    """Computes Y = X W^T + b with a temporary dense copy of W."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, codes: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.codes = codes
        return F.linear(inputs, codes.new_empty(codes.quant_state.shape, dtype=inputs.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bias_gradient = gradient.sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, bias_gradient
        matrix = ctx.codes.quant_state.dense_copy(ctx.codes).to(gradient.dtype)
        return torch.matmul(gradient, matrix), None, bias_gradient


def hold_in_4bit(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Replace the linear layers of a model's blocks by NF4 ones, as `slivertune train` does.

    Args:
        model: Model, changed in place.
        compute_dtype: Dtype in which products are computed.
    """
    replace_linear(model, partial(CodedLinear, compute_dtype=compute_dtype))


def replace_linear(model: nn.Module, replacement: Callable[[nn.Linear], nn.Linear]) -> None:
    """Replace the linear layers of a model's blocks.

    Args:
        model: Model, changed in place.
        replacement: Function that makes a layer from the one that it replaces.
    """
    in_blocks = modules_in_blocks(model)
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if type(module) is nn.Linear and id(module) in in_blocks:
            owner, _, name = path.rpartition(".")
            setattr(modules[owner], name, replacement(module))


def hold_others_in_fp32(model: nn.Module) -> None:
    """Cast all weights beside quantised ones to fp32, as PEFT's `prepare_model_for_kbit_training` does.

    Args:
        model: Model, changed in place.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def num_weights(module: nn.Module) -> int:
    """Count the elements of a module's weights: a 4-bit weight by its dense elements, a tied weight once."""
    return sum(math.prod(getattr(each, "quant_state", each).shape) for each in module.parameters())
