"""Linear layers in LLM.int8 as fake tensors, since bitsandbytes' own layers need values that a plan does not have.

A weight takes one byte per element and four bytes per row. A product quantises its input, makes an output in int32, and
keeps the input for the backward, which makes a dense copy of the weight (Dettmers et al., 2022, section 3). Columns of
outliers, of which there are few, are not counted.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class EightBitLinear(nn.Linear):
    """Linear layer with a frozen weight in int8, which computes only sizes.

    Args:
        dense: Layer that it replaces.
    """

    def __init__(self, dense: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.weight = nn.Parameter(torch.empty_like(dense.weight, dtype=torch.int8), requires_grad=False)
        self.bias = dense.bias
        self.register_buffer("scales", torch.empty(dense.out_features, device=dense.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name for it
        """Compute the product, in the input's dtype.

        Args:
            input: Shape (..., in).
        """
        product: torch.Tensor = _EightBitProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class _EightBitProduct(torch.autograd.Function):
    """Computes Y = X W^T + b in int8."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        quantised = rows.to(torch.float16).to(torch.int8)
        scales = rows.new_empty(len(rows), dtype=torch.float32)
        sums = rows.new_empty((len(rows), len(codes)), dtype=torch.int32)
        output = sums.to(inputs.dtype)
        del quantised, scales, sums
        if ctx.needs_input_grad[0]:
            ctx.rows = rows
        ctx.codes, ctx.dtype = codes, inputs.dtype
        return output.reshape(*inputs.shape[:-1], len(codes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, bias_gradient
        return torch.matmul(gradient.to(ctx.dtype), ctx.codes.to(ctx.dtype)), None, bias_gradient
