"""SM3-II on some entries of a matrix, with one accumulator a row and one a column (Anil et al., arXiv 1901.11150)."""

import math

import torch


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor seen as a matrix, whose rows and columns are some of its extents each (1 column for a vector).

    Of several ways to cut the extents in two, the one with the fewest rows and columns: a stack of experts
    (experts, out, in) has one row for each output of each expert, a convolution (out, in, height, width) one for each
    output.
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
    """One SM3-II update of the active entries, in place (SFT, Algorithm 2).

    nu = min(r_i, c_j) + g^2, r_i = max(r_i, nu), c_j = max(c_j, nu), u = g / (sqrt(nu) + eps);
    with momentum b, u = b u_before + (1 - b) u; delta = (1 - lr wd) delta - lr u.

    Args:
        delta: fp32, shape (n,).
        gradient: fp32, shape (n,).
        indices: int32, shape (n,): positions of the entries in the flattened matrix.
        rows: r, fp32, shape (number of rows,).
        columns: c, fp32, shape (number of columns,).
        momentum_buffer: fp32, shape (n,); None without momentum.
        lr: Learning rate.
        momentum: b, in [0, 1).
        eps: Added to the denominator.
        weight_decay: wd, decoupled.
    """
    row = torch.div(indices, columns.numel(), rounding_mode="floor").long()
    column = indices.long() - row * columns.numel()
    accumulator = torch.minimum(rows[row], columns[column]).addcmul_(gradient, gradient)
    rows.scatter_reduce_(0, row, accumulator, "amax")
    columns.scatter_reduce_(0, column, accumulator, "amax")
    update = gradient / accumulator.sqrt_().add_(eps)
    if momentum_buffer is not None:
        update = momentum_buffer.lerp_(update, 1 - momentum)
    if weight_decay:
        delta.mul_(1 - lr * weight_decay)
    delta.add_(update, alpha=-lr)
