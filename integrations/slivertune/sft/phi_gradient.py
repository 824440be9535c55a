"""The gradient of a linear layer's active weights, without its dense gradient (SFT, appendix B)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch

CHUNK_ROWS = 1024
"""Most rows of the dense gradient that exist together."""


def chunked_gradient(
    output_gradient: torch.Tensor,
    inputs: torch.Tensor,
    indices: torch.Tensor,
    on_chunk: Callable[[torch.Tensor, int], None] | None = None,
) -> torch.Tensor:
    """Compute dY^T X some rows at a time, and keep the active entries of each.

    Costs the same products as the dense gradient, and memory for `CHUNK_ROWS` of its rows.

    Args:
        output_gradient: dY, shape (tokens, out).
        inputs: X, shape (tokens, in), of the same dtype.
        indices: int32, sorted flat positions in the (out, in) matrix, shape (n,).
        on_chunk: Called with each flat chunk and the flat position of its first entry.

    Returns:
        fp32, shape (n,): the same bits as the dense gradient's entries, as far as the matrix product sums each entry in
        an order that does not depend on the number of rows.
    """
    num_rows, num_columns = output_gradient.shape[1], inputs.shape[1]
    # Chunks of one size: for a rest of a few rows, products are summed by another kernel, in another order.
    chunk_rows = math.ceil(num_rows / math.ceil(num_rows / CHUNK_ROWS))
    starts = list(range(0, num_rows, chunk_rows))
    bounds = torch.searchsorted(indices.long(), _tensor([*starts, num_rows], indices.device) * num_columns).tolist()
    gradient = torch.empty(indices.numel(), device=indices.device)
    buffer = inputs.new_empty(chunk_rows, num_columns)
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        rows = output_gradient[:, start : start + chunk_rows]
        chunk = torch.mm(rows.t(), inputs, out=buffer[: rows.shape[1]]).view(-1)
        gradient[first:last] = chunk.index_select(0, indices[first:last] - start * num_columns)
        if on_chunk is not None:
            on_chunk(chunk, start * num_columns)
    return gradient


def sampled_gradient(output_gradient: torch.Tensor, inputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Compute the active entries of dY^T X alone, one dot product each (SFT, equation 16).

    Args:
        output_gradient: dY, fp32, shape (tokens, out), on the CPU.
        inputs: X, fp32, shape (tokens, in), on the CPU.
        indices: int32, sorted flat positions in the (out, in) matrix, shape (n,).

    Returns:
        fp32, shape (n,); sums run in another order than in the dense product.
    """
    num_rows, num_columns = output_gradient.shape[1], inputs.shape[1]
    positions = indices.long()
    edges = torch.arange(num_rows + 1, device=indices.device) * num_columns
    with warnings.catch_warnings():
        # torch says at the first use that its CSR tensors are a beta feature.
        warnings.simplefilter("ignore", UserWarning)
        pattern = torch.sparse_csr_tensor(
            torch.searchsorted(positions, edges),
            positions % num_columns,
            torch.zeros(indices.numel()),
            size=(num_rows, num_columns),
            check_invariants=False,
        )
        products: torch.Tensor = torch.sparse.sampled_addmm(pattern, output_gradient.t(), inputs, beta=0.0)
        return products.values()


def _tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
