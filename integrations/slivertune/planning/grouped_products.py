"""Matrix products of the experts in a mixture of experts, as fake tensors.

transformers sorts the tokens by expert and multiplies each expert's tokens by its matrix, in one call of torch's
`grouped_mm`. The sizes that such a product saves and returns depend on the number of tokens and of choices, but not on
the experts that are chosen, so that a plan needs no values. torch knows these sizes for bf16 only and counts no
operations. The replacement here works in every dtype and counts them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_ALIGNMENT_BYTES = 16
"""Alignment of the rows of both factors in bytes, on a GPU and on the CPU."""


def multiply_in_groups(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tell: Callable[[int, int], None],
) -> torch.Tensor:
    """Replace `torch.nn.functional.grouped_mm` by a product with arbitrary values.

    Args:
        mat_a: Rows sorted by group, shape (rows, in).
        mat_b: One matrix per group, shape (groups, in, out).
        offs: End of each group's rows, int32.
        bias: Not supported, as in torch.
        out_dtype: Dtype of `mat_a`, as in torch.
        tell: Function that receives the floating-point operations of each product, and the bytes read and written.

    Returns:
        Product, shape (rows, out).

    Raises:
        ValueError: If the factors have other shapes, or rows that torch's kernels do not accept.
    """
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None:
        raise ValueError(
            f"grouped_mm of shapes {tuple(mat_a.shape)} and {tuple(mat_b.shape)} has no plan. It needs rows sorted by "
            "group and one matrix per group, without a bias"
        )
    for width in (mat_a.shape[1], mat_b.shape[2]):
        if width * mat_b.element_size() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"experts of width {width} in {mat_b.dtype} have rows that are no multiple of {_ALIGNMENT_BYTES} "
                "bytes, which torch's grouped products refuse. Change the model's hidden or intermediate size"
            )
    result: torch.Tensor = _GroupedProduct.apply(mat_a, mat_b, tell)  # type: ignore[no-untyped-call]
    return result


class _GroupedProduct(torch.autograd.Function):
    """Computes Y_g = X_g W_g for the rows of each group g."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, tell: Callable[[int, int], None]) -> torch.Tensor:
        # Each factor is saved for the other's gradient, so that frozen experts save no rows.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, matrices if ctx.needs_input_grad[0] else None)
        product = rows.new_empty(rows.shape[0], matrices.shape[2])
        # Each row has one matrix and 2 operations per multiply-add. All matrices are read, as with a large batch.
        ctx.work = 2 * rows.numel() * matrices.shape[2], rows.nbytes + matrices.nbytes + product.nbytes
        ctx.forms, ctx.tell = [(each.shape, each.stride(), each.dtype) for each in (rows, matrices)], tell
        tell(*ctx.work)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients: list[torch.Tensor | None] = [None, None, None]
        for index, (size, stride, dtype) in enumerate(ctx.forms):
            if ctx.needs_input_grad[index]:
                gradients[index] = torch.empty_strided(size, stride, dtype=dtype)
                ctx.tell(*ctx.work)
        return tuple(gradients)
