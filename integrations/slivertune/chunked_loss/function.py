"""`chunked_cross_entropy`: a head's product and its loss in one autograd function."""

from typing import Any

import torch

from slivertune.chunked_loss.products import score_rows, weight_gradients, wide_dtype
from slivertune.core.setting_checks import check_integer
from slivertune.core.torch_internals import apply_function

CHUNK_BYTES = 64 * 2**20
"""Bytes of the fp32 scores that exist at a time: a chunk of 512 rows of 32,000 classes, or 128 of 128,000. A GPU
multiplies such chunks at nearly full speed (it wants 100 to 300 rows per read of the weight). At long sequences, a
block of a 7B model needs more in its backward, so the chunk does not set the peak."""

IGNORED = -100
"""Target of a row that is not scored, as in torch."""
_INTEGERS = (torch.int32, torch.int64)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = IGNORED,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Compute the cross-entropy of `hidden @ weight.T + bias`, without holding the logits or their gradient whole.

    The result is that of a causal LM's head and `torch.nn.functional.cross_entropy` of its logits in fp32. The forward
    goes through the rows, and computes the loss and the gradient of `hidden`. The backward goes through the classes,
    and writes the gradient of `weight` into the one tensor that becomes its `.grad`, each entry rounded once. Frozen
    inputs cost nothing. Under autocast, products are computed in its dtype. Memory beside inputs and gradients: 1 to
    1.5 `chunk_bytes`, one copy of the weight if it is cast, and 1 to 3 fp32 numbers per row. A gradient of the weight
    costs one more product than usual, since scores are computed twice.

    Args:
        hidden: Hidden states, shape (..., size).
        weight: The head's weight, shape (classes, size).
        targets: Class of each row, int64, shape (...), already shifted for a causal model.
        bias: The head's bias, shape (classes,).
        num_items_in_batch: Divisor of the sum of losses; None for the number of scored rows.
        ignore_index: Target of rows that are not scored, -100 by default.
        chunk_bytes: Bytes of the fp32 scores that exist at a time, but at least those of one row or class. 64 MiB by
            default.

    Returns:
        Loss, a scalar in fp32 (fp64 for fp64 inputs); NaN if no row is scored and no divisor is given.

    Raises:
        ValueError: If shapes or dtypes don't fit each other, or `chunk_bytes` is below 1.
        RuntimeError: If the backward is to be differentiated again.

    Example:
        >>> hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        >>> loss = slivertune.chunked_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:])
    """
    dtype = _compute_dtype(hidden)
    check_integer("chunk_bytes", chunk_bytes, 1)
    _check(hidden, weight, bias, targets, num_items_in_batch)
    return apply_function(
        _ChunkedCrossEntropy,
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1).to(hidden.device),
        num_items_in_batch,
        ignore_index,
        {"dtype": dtype, "chunk_bytes": chunk_bytes},
        # Not in fp16: small gradients would vanish there, before the loss scale of a GradScaler has lifted them. The
        # scale is known only in the backward.
        torch.is_grad_enabled() and hidden.requires_grad and dtype != torch.float16,
    )


class MixedDtypesError(ValueError):
    """Error of hidden states and a weight in two dtypes, which only autocast multiplies, as in a linear layer."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        num_items: torch.Tensor | float | None,
        ignore_index: int,
        chunks: dict[str, Any],
        hidden_gradient_now: bool,
    ) -> torch.Tensor:
        is_scored = targets != ignore_index
        divisor = is_scored.sum() if num_items is None else num_items
        divisor = torch.as_tensor(divisor, dtype=wide_dtype(chunks["dtype"]), device=hidden.device)
        row_scales = torch.where(is_scored, 1 / divisor, 0)
        targets = torch.where(is_scored, targets, 0)
        given = (hidden, weight, bias, targets, row_scales)
        with torch.autocast(hidden.device.type, enabled=False):
            losses, peaks, totals, hidden_gradient = score_rows(*given, **chunks, with_gradient=hidden_gradient_now)
        of_hidden, ctx.of_weight, ctx.of_bias, *_ = ctx.needs_input_grad
        ctx.of_hidden = of_hidden and not hidden_gradient_now
        ctx.chunks = chunks
        again = ctx.of_hidden or ctx.of_weight or ctx.of_bias
        ctx.save_for_backward(hidden_gradient, *((*given, peaks, totals) if again else ()))
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of chunked_cross_entropy can't be differentiated again (create_graph=True). Compute the "
                "loss from whole logits for that"
            )
        hidden_gradient, *rest = ctx.saved_tensors
        weight_gradient = bias_gradient = None
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * loss_gradient
        if rest:
            hidden, weight, bias, targets, row_scales, *scored = rest
            given = (hidden, weight, bias, targets, row_scales * loss_gradient)
            with torch.autocast(loss_gradient.device.type, enabled=False):
                if ctx.of_hidden:
                    *_, hidden_gradient = score_rows(*given, **ctx.chunks, with_gradient=True)
                if ctx.of_weight or ctx.of_bias:
                    weight_gradient, bias_gradient = weight_gradients(
                        *given, scored, **ctx.chunks, of_weight=ctx.of_weight, of_bias=ctx.of_bias
                    )
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None, None, None


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype that autocast would choose for the head's product."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    num_items: torch.Tensor | float | None,
) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not len(weight):
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} don't go with a weight of shape {tuple(weight.shape)}. "
            "Pass a weight of shape (classes, size of the hidden states), of at least one class"
        )
    if targets.dtype not in _INTEGERS:
        raise ValueError(f"targets in {targets.dtype} name no classes. Pass the classes' numbers, in int64")
    if isinstance(num_items, torch.Tensor) and num_items.numel() != 1:
        raise ValueError(
            f"num_items_in_batch of shape {tuple(num_items.shape)} must be one number, the targets that count in the "
            "batch. Pass their sum"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"a bias of shape {tuple(bias.shape)} must have one number for each of {weight.shape[0]} classes. Pass "
            f"one of shape ({weight.shape[0]},)"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} don't match hidden states of shape {tuple(hidden.shape)}. "
            "Give one target for each"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise MixedDtypesError(
            f"hidden states in {hidden.dtype} don't go with a weight in {weight.dtype}. Use one dtype, or autocast"
        )
