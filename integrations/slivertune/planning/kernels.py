"""Stand-ins for GPU kernels in a step that runs on the CPU, with the GPU's memory use.

A plan's tensors claim to be on the CPU, so torch would run the CPU's operators. Three of these save other tensors for
the backward than on a GPU: attention, dropout, and operators that autocast runs in fp32. This module replaces them. It
also replaces the experts' grouped products, which torch supports on fake tensors in one dtype only
(`grouped_products`). All other operators are the same on both devices.

The attention kernel is the one that torch selects on a GPU. Flash and memory-efficient attention save queries, keys,
values, the output, the log-sum-exp of the scores, and the mask if there is one. They never store scores. The plan of a
run on the CPU (`kernels="cpu"`) uses the CPU's own attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from slivertune.core.torch_internals import GROUPED_PRODUCT, plain_attention
from slivertune.planning.grouped_products import multiply_in_groups

Kernels = Literal["gpu", "cpu"]
"""Device on which a step is to run. A plan counts the kernels of this device."""
KernelName = Literal["flash", "efficient", "math"]

_LARGEST_FLASH_HEAD = 256
_EFFICIENT_ROWS = 32
"""Multiple to which the memory-efficient kernel pads the rows of its log-sum-exp."""


def pick_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> KernelName:
    """Return the kernel that torch selects for these inputs on a GPU of compute capability 8.0 (Ampere) or later.

    Args:
        query: Shape (batch, heads, n, head size).
        key: Shape (batch, key heads, m, head size).
        value: Same shape as `key`, but with its own head size.
        mask: Float mask that is added to the scores, or bool mask that selects them; None for no mask.

    Returns:
        "flash" for 16-bit inputs without a mask, with one head size of at most 256. Else "efficient" (memory-efficient
        attention), or "math" (plain operators that store all scores) if heads share keys without a mask.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    same_size = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if is_half and mask is None and same_size and query.shape[-1] <= _LARGEST_FLASH_HEAD:
        return "flash"
    # Only TokenTune passes a mask with shared keys. On a GPU it folds the queries into rows of a key's head.
    if query.shape[1] == key.shape[1] or mask is not None:
        return "efficient"
    return "math"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replace `torch.nn.functional.scaled_dot_product_attention` by a call whose result has arbitrary values.

    Args:
        query: Shape (batch, heads, n, head size).
        key: Shape (batch, key heads, m, head size).
        value: Same shape as `key`, but with its own head size.
        attn_mask: Bool or float mask, broadcast to (batch, heads, n, m).
        dropout_p: Dropout probability. Kernels that store no scores save only a seed for it.
        is_causal: As in torch.
        scale: As in torch.
        enable_gqa: Whether several query heads share one key head.

    Returns:
        Tensor of shape (batch, heads, n, value's head size), in the kernel's memory order: that of the queries for
        flash attention, else (batch, n, heads, head size).
    """
    kernel = pick_kernel(query, key, value, attn_mask)
    if kernel == "math":
        return plain_attention(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    result: torch.Tensor = _Fused.apply(query, key, value, attn_mask, kernel, is_causal)  # type: ignore[no-untyped-call]
    return result


_listeners: list[Callable[[int, int, int], None]] = []


@contextmanager
def attention_seen_by(listener: Callable[[int, int, int], None]) -> Iterator[None]:
    """Report each kernel that stands for attention or experts, and so calls no operator, to a listener.

    Args:
        listener: Callback that takes a kernel's floating-point operations, the bytes that it reads and writes, and the
            number of such kernels.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell(flops_per_score: int, is_causal: bool, query: torch.Tensor, *others: torch.Tensor) -> None:
    """Report a kernel that reads or writes the queries and the other tensors, of which the keys come first."""
    scores = query.shape[:3].numel() * others[0].shape[2]
    if is_causal:
        scores //= 2  # the kernel skips blocks above the diagonal
    tell_listeners(flops_per_score * scores, sum(each.nbytes for each in (query, *others)))


def tell_listeners(flops: int, num_bytes: int, number: int = 1) -> None:
    """Report kernels that call no operator to all listeners.

    Args:
        flops: Floating-point operations of one kernel.
        num_bytes: Bytes of memory that it reads and writes.
        number: Number of such kernels.
    """
    for listener in _listeners:
        listener(flops, num_bytes, number)


class _Fused(torch.autograd.Function):
    """Fused attention that stores no scores, as tensors of the right sizes only."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kernel: KernelName,
        is_causal: bool,
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        if kernel == "flash":
            out = torch.empty_like(query)  # the queries' layout decides whether the next product copies
        else:
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        rows = length if kernel == "flash" else -(-length // _EFFICIENT_ROWS) * _EFFICIENT_ROWS
        logarithms = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.kernel, ctx.is_causal = kernel, is_causal
        ctx.save_for_backward(query, key, value, mask, out, logarithms)
        # Two products (queries by keys, weights by values), with two operations per multiply-add.
        _tell(2 * (query.shape[-1] + value.shape[-1]), is_causal, query, key, value, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, out, logarithms = ctx.saved_tensors
        # The sums of gradient times output, one per row of the log-sum-exp, live while the kernel runs.
        temporaries = [torch.empty_like(logarithms)]
        if ctx.kernel == "flash":
            temporaries.append(torch.empty_like(query, dtype=torch.float32))  # the queries' gradient, summed in fp32
            if query.shape[1] != key.shape[1]:
                by_query_head = (query.shape[0], query.shape[1], key.shape[2], key.shape[3])
                temporaries += [key.new_empty(by_query_head), value.new_empty(by_query_head)]
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        # Five products: recomputed scores, and the gradients of weights, values, queries and keys.
        flops_per_score = 2 * (3 * query.shape[-1] + 2 * value.shape[-1])
        _tell(flops_per_score, ctx.is_causal, query, key, value, out, gradient, *gradients)
        return *gradients, None, None, None


def kernels_of(kernels: Kernels) -> TorchFunctionMode:
    """Return a mode in which torch's functions save the same tensors as on a GPU, or as on the CPU.

    Args:
        kernels: Device whose kernels count.
    """
    return GpuKernels() if kernels == "gpu" else KnownKernels()


class KnownKernels(TorchFunctionMode):
    """Context manager in which torch supports all functions on fake tensors.

    No other code is changed: the mode sees each call of a torch function and replaces the calls that need it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is GROUPED_PRODUCT:
            return multiply_in_groups(*args, **(kwargs or {}), tell=tell_listeners)
        return func(*args, **(kwargs or {}))


class GpuKernels(KnownKernels):
    """Context manager in which torch's functions also save the tensors that they would save on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _REPLACED:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attend(*map(_in_autocast_dtype, args), **{key: _in_autocast_dtype(kwargs[key]) for key in kwargs})
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_in_fp32, args), **{key: _in_fp32(value) for key, value in kwargs.items()})
        return super().__torch_function__(func, types, args, kwargs)


# https://docs.pytorch.org/docs/2.13/amp.html: "CUDA Ops that can autocast to float32", only those that language models
# call. The CPU's autocast leaves them in bf16.
_IN_FP32 = frozenset(
    {
        F.cosine_similarity,
        F.cross_entropy,
        F.layer_norm,
        F.log_softmax,
        F.nll_loss,
        F.softmax,
        F.softplus,
        torch.Tensor.cumsum,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.log_softmax,
        torch.Tensor.norm,
        torch.Tensor.pow,
        torch.Tensor.prod,
        torch.Tensor.rsqrt,
        torch.Tensor.softmax,
        torch.Tensor.sum,
        torch.cumsum,
        torch.exp,
        torch.log,
        torch.log_softmax,
        torch.norm,
        torch.pow,
        torch.prod,
        torch.rsqrt,
        torch.softmax,
        torch.sum,
    }
)


_REPLACED = _IN_FP32 | {F.scaled_dot_product_attention, F.dropout, GROUPED_PRODUCT}
"""Functions that a GPU computes otherwise."""


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _in_autocast_dtype(value: Any) -> Any:
    is_cast = isinstance(value, torch.Tensor) and value.is_floating_point() and torch.is_autocast_enabled("cpu")
    return value.to(torch.get_autocast_dtype("cpu")) if is_cast else value


def _dropout(
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Apply dropout with a mask of 1 byte per element, as a GPU's fused kernel does. The CPU saves the noise itself."""
    if not training or p == 0:
        return input
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(output) if inplace else output
