"""Scores of some rows or some classes at a time, from which the loss and its gradients are summed."""

import math
from collections.abc import Iterator, Sequence

import torch

from slivertune.core.repeated_work import different


def even_slices(count: int, bytes_of_one: int, chunk_bytes: int) -> Iterator[slice]:
    """Cut [0, count) into slices of one size, each of at most `chunk_bytes` or of one element.

    Args:
        count: Number of elements.
        bytes_of_one: Bytes per element.
        chunk_bytes: Largest number of bytes of a slice.

    Yields:
        Slices, in order; the last may be shorter.
    """
    most = max(1, chunk_bytes // max(1, bytes_of_one))
    # Another kernel would multiply a short rest, at a fraction of the speed.
    size = math.ceil(count / max(1, math.ceil(count / most)))
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + size, count))


class ScoreBuffers:
    """Memory of one chunk of scores, which all chunks reuse.

    Args:
        num_elements: Number of elements of the largest chunk.
        dtype: Dtype in which scores are computed.
        device: Device of the buffers.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._narrow = torch.empty(num_elements, dtype=dtype, device=device)
        wide = wide_dtype(dtype)
        self._wide = self._narrow if wide == dtype else torch.empty(num_elements, dtype=wide, device=device)

    def scores(self, hidden: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute hidden @ matrix^T + bias, rounded to the computing dtype and then widened, as models do it.

        Args:
            hidden: Hidden states, shape (rows, size), in the computing dtype.
            matrix: Weight, shape (classes, size), in the computing dtype.
            bias: Bias, shape (classes,), in the computing dtype.

        Returns:
            Scores, shape (rows, classes), wide; the next call overwrites them.
        """
        shape = (hidden.shape[0], matrix.shape[0])
        narrow = _front(self._narrow, shape)
        if bias is None:
            torch.mm(hidden, matrix.t(), out=narrow)
        else:
            torch.addmm(bias, hidden, matrix.t(), out=narrow)
        return narrow if self._wide is self._narrow else _front(self._wide, shape).copy_(narrow)

    def narrowed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores or their gradient in the computing dtype again, in the same memory as before."""
        return scores if self._wide is self._narrow else _front(self._narrow, tuple(scores.shape)).copy_(scores)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums: fp32, or fp64 if the model computes in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def score_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    row_scales: torch.Tensor,
    *,
    dtype: torch.dtype,
    chunk_bytes: int,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the losses and the gradient of `hidden` in chunks of rows, over all classes at once.

    Args:
        hidden: Hidden states, shape (n, size).
        weight: Weight of the head, shape (classes, size).
        bias: Bias of the head, shape (classes,).
        targets: Targets, int64, shape (n,), in [0, classes).
        row_scales: Scale of each row's gradient, wide, shape (n,); 0 without a target.
        dtype: Dtype in which products are computed.
        chunk_bytes: Bytes of the wide scores that exist at a time.
        with_gradient: Whether to compute the gradient of `hidden`.

    Returns:
        Losses, -log p(target), shape (n,), wide, 0 without a target; the largest score of each row, its peak, shape
        (n, 1), wide; the sum of exp(score - peak) of each row, shape (n, 1), wide; and the gradient of `hidden`, if it
        was requested.
    """
    num_rows, num_classes = hidden.shape[0], weight.shape[0]
    wide = wide_dtype(dtype)
    losses, peaks, totals = (hidden.new_empty((num_rows, 1), dtype=wide) for _ in range(3))
    hidden_gradient = torch.empty_like(hidden) if with_gradient else None
    matrix = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    parts = list(even_slices(num_rows, num_classes * wide.itemsize, chunk_bytes))
    buffers = ScoreBuffers(max([0, *(part.stop - part.start for part in parts)]) * num_classes, dtype, hidden.device)
    for part in different(parts, hidden):
        scores = buffers.scores(hidden[part].to(dtype), matrix, bias)
        classes, scales = targets[part, None], row_scales[part, None]
        peak = torch.amax(scores, 1, keepdim=True)
        below_peak = peak - scores.gather(1, classes)
        total = scores.sub_(peak).exp_().sum(1, keepdim=True)
        losses[part] = torch.where(scales != 0, below_peak + total.log(), 0)
        peaks[part], totals[part] = peak, total
        if hidden_gradient is not None:
            scores.mul_(scales / total).scatter_add_(1, classes, -scales)
            hidden_gradient[part] = torch.mm(buffers.narrowed(scores), matrix)
    return losses.view(-1), peaks, totals, hidden_gradient


def weight_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    row_scales: torch.Tensor,
    scored: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype,
    chunk_bytes: int,
    of_weight: bool,
    of_bias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute gradients in chunks of classes, over all rows: each entry is summed in one product, rounded once.

    Args:
        hidden: Hidden states, shape (n, size).
        weight: Weight of the head, shape (classes, size).
        bias: Bias of the head, shape (classes,).
        targets: Targets, int64, shape (n,), in [0, classes).
        row_scales: Scale of each row's gradient, wide, shape (n,); 0 without a target.
        scored: Peaks and totals of the rows.
        dtype: Dtype in which products are computed.
        chunk_bytes: Bytes of the wide scores that exist at a time.
        of_weight: Whether to compute the gradient of `weight`.
        of_bias: Whether to compute the gradient of `bias`.

    Returns:
        Gradients of weight and bias, in their dtypes; None if not requested.
    """
    num_rows, num_classes = hidden.shape[0], weight.shape[0]
    hidden = hidden.to(dtype)
    peaks, totals = scored
    softmax_scales, targets = row_scales[:, None] / totals, targets[:, None]
    weight_gradient = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else None
    bias_gradient = torch.empty_like(bias) if of_bias and bias is not None else None
    parts = list(even_slices(num_classes, num_rows * wide_dtype(dtype).itemsize, chunk_bytes))
    buffers = ScoreBuffers(max([0, *(part.stop - part.start for part in parts)]) * num_rows, dtype, hidden.device)
    for part in different(parts, hidden):
        scores = buffers.scores(hidden, weight[part].to(dtype), None if bias is None else bias[part].to(dtype))
        scores.sub_(peaks).exp_().mul_(softmax_scales)
        is_here = (targets >= part.start) & (targets < part.stop)
        places = (targets - part.start).clamp_(0, part.stop - part.start - 1)
        scores.scatter_add_(1, places, torch.where(is_here, -row_scales[:, None], 0))
        if bias_gradient is not None:
            bias_gradient[part] = scores.sum(0)
        if weight_gradient is not None:
            narrow, rows = buffers.narrowed(scores).t(), weight_gradient[part]
            if rows.dtype == dtype:
                torch.mm(narrow, hidden, out=rows)  # with one part, a separate product would be a second gradient
            else:
                rows.copy_(torch.mm(narrow, hidden))
    return weight_gradient, bias_gradient


def _front(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[: math.prod(shape)].view(shape)
