"""SM3-II on some entries of a matrix, with one accumulator per row and per column (Anil et al., arXiv 1901.11150)."""

import math

import torch


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor viewed as a matrix (1 column for a vector).

    The tensor's extents are cut in two, so that there are the fewest rows and columns: a stack of experts
    (experts, out, in) has one row per output of each expert, a convolution (out, in, height, width) one per output.
    """
    if not shape:
        return 1, 1
    cuts = range(1, max(2, len(shape)))
    return min(((math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts), key=sum)


def sm3_(
    delta: torch.Tensor,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    *,
    lr: float,
    momentum: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Apply one SM3-II update to the active entries, in place (SFT, Algorithm 2).

    nu = min(r_i, c_j) + g^2, r_i = max(r_i, nu), c_j = max(c_j, nu), u = g / (sqrt(nu) + eps);
    with momentum b, u = b u_before + (1 - b) u; delta = (1 - lr wd) delta - lr u.

    Args:
        delta: Deltas, fp32, shape (n,).
        gradient: Gradient g, fp32, shape (n,).
        indices: Positions of the entries in the flattened matrix, int32, shape (n,).
        rows: Row accumulators r, fp32, shape (number of rows,).
        columns: Column accumulators c, fp32, shape (number of columns,).
        momentum_buffer: Averages of u, fp32, shape (n,); None without momentum.
        lr: Learning rate.
        momentum: Momentum b, in [0, 1).
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay wd.
    """
    row = torch.div(indices, columns.numel(), rounding_mode="floor").long()
    column = indices.long() - row * columns.numel()
    accumulator = torch.minimum(rows[row], columns[column]).addcmul_(gradient, gradient)
    rows.scatter_reduce_(0, row, accumulator, "amax")
    columns.scatter_reduce_(0, column, accumulator, "amax")
    # The root is at least |g|, except where squares underflow.
    root = torch.maximum(accumulator.sqrt_(), gradient.abs(), out=accumulator)
    update = gradient / root.add_(eps)
    if momentum_buffer is not None:
        update = momentum_buffer.lerp_(update, 1 - momentum)
    if weight_decay:
        delta.mul_(1 - lr * weight_decay)
    delta.add_(update, alpha=-lr)
