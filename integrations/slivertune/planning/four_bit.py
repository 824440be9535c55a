"""Linear layers in NF4, by their sizes: bitsandbytes' own need values, which a plan has not.

A weight of n elements takes n / 2 bytes of codes, a byte for the scale of every 64 elements, and, since these are
quantised again, four bytes for every 256 scales (QLoRA, section 3). A product takes a dense copy of the weight for as
long as it lasts; nothing of it is kept for the backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from slivertune.core.layers import find_layers

_BLOCK = 64
"""Weights that share a scale."""
_SCALES_BLOCK = 256
"""Scales that share a scale of their own."""
_TABLE_SIZE = 16 + 256 + 1
"""Values of the codes, of the scales' codes, and the scales' mean; fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedState:
    """What bitsandbytes' codes carry as their `quant_state`, as far as sizes depend on it."""

    shape: tuple[int, ...]
    """Extents of the dense weight."""
    dtype: torch.dtype
    """What the dense weight was stored in."""

    def dense_copy(self, codes: torch.Tensor) -> torch.Tensor:
        """A dense copy of the weight."""
        return codes.new_empty(self.shape, dtype=self.dtype)


class CodedLinear(nn.Linear):
    """A linear layer whose frozen weight is held in NF4 with double quantisation; it computes sizes alone.

    Args:
        dense: The layer it stands for.
        compute_dtype: In what the product is computed.
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
        """The product, in the input's dtype.

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
    """Y = X W^T + b with a W that is made dense for the moment."""

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
    """Put the linear layers of a model's blocks into NF4, as `slivertune train` does.

    Args:
        model: The model; changed.
        compute_dtype: In what products are computed.
    """
    in_blocks = {name for layer in find_layers(model) if layer.kind == "block" for name in layer.parameter_names}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if type(module) is nn.Linear and f"{path}.weight" in in_blocks:
            owner, _, name = path.rpartition(".")
            setattr(modules[owner], name, CodedLinear(module, compute_dtype))


def num_weights(module: nn.Module) -> int:
    """Weights of a module and all in it; one in 4 bits counts as one, a tied one once."""
    return sum(math.prod(getattr(each, "quant_state", each).shape) for each in module.parameters())
