"""What a GPU's kernels keep and take, for a step that runs on the CPU.

A plan's tensors say that they lie on the CPU, so torch would give them the CPU's operators. Three of these keep other
things for the backward than those of a GPU, and are answered here in their place: attention, dropout, and what autocast
computes in fp32. A fourth, the experts' grouped products, torch knows without data in one dtype alone
(`grouped_products`). All else is the same on both.

The attention kernel is the one that torch picks on a GPU. Flash and memory-efficient attention keep queries, keys,
values, their output and the logarithms of the softmax's sums (and the mask, if there is one); no scores are ever
stored. A run on the CPU (`kernels="cpu"`) is planned with the CPU's own.
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
"""Where a step is to run, and so whose kernels it is to count."""
KernelName = Literal["flash", "efficient", "math"]

_LARGEST_FLASH_HEAD = 256
_EFFICIENT_ROWS = 32
"""The memory-efficient kernel pads the rows of its logarithms to a multiple of this."""


def pick_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> KernelName:
    """Which kernel torch picks on a GPU since 8.0 (Ampere) for these inputs.

    Args:
        query: Shape (batch, heads, n, head size).
        key: Shape (batch, key heads, m, head size).
        value: As `key`, with a head size of its own.
        mask: What is added to the scores, or which of them count; None for none.

    Returns:
        Flash for 16 bits without a mask; the memory-efficient one for fp32 and masks; where that has no form for it
        (fp32 heads that share keys, without a mask), plain operators that store all scores.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    same_size = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if is_half and mask is None and same_size and query.shape[-1] <= _LARGEST_FLASH_HEAD:
        return "flash"
    # TokenTune alone gives a mask with shared keys here; on a GPU it folds the queries into rows of a key's head.
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
    """Stand in for `torch.nn.functional.scaled_dot_product_attention`; the values of the result are arbitrary.

    Args:
        query: Shape (batch, heads, n, head size).
        key: Shape (batch, key heads, m, head size).
        value: As `key`, with a head size of its own.
        attn_mask: Bool or float, broadcast to (batch, heads, n, m).
        dropout_p: Kept as a seed alone by the kernels that store no scores.
        is_causal: As in torch.
        scale: As in torch.
        enable_gqa: Whether several heads of queries share one of keys.

    Returns:
        Shape (batch, heads, n, value's head size), laid out in memory as the kernel does: by flash attention as the
        queries are, else with heads beside head sizes.
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


_listeners: list[Callable[[int, int], None]] = []


@contextmanager
def attention_seen_by(listener: Callable[[int, int], None]) -> Iterator[None]:
    """Tell of each kernel that stands for attention or for experts, which no operator shows.

    Args:
        listener: Called with a kernel's floating-point operations, and the bytes of memory that it reads and writes.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell(flops_per_score: int, is_causal: bool, query: torch.Tensor, *others: torch.Tensor) -> None:
    """Tell listeners of a kernel that reads or writes the queries and these others, the keys first."""
    scores = query.shape[:3].numel() * others[0].shape[2]
    if is_causal:
        scores //= 2  # blocks above the diagonal are left out
    tell_listeners(flops_per_score * scores, sum(each.nbytes for each in (query, *others)))


def tell_listeners(flops: int, num_bytes: int) -> None:
    """Tell listeners of a kernel that no operator shows.

    Args:
        flops: Its floating-point operations.
        num_bytes: Of memory that it reads and writes.
    """
    for listener in _listeners:
        listener(flops, num_bytes)


class _Fused(torch.autograd.Function):
    """A kernel that stores no scores, by its sizes."""

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
            out = torch.empty_like(query)  # laid out as the queries are, which decides whether the next product copies
        else:
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        rows = length if kernel == "flash" else -(-length // _EFFICIENT_ROWS) * _EFFICIENT_ROWS
        logarithms = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.kernel, ctx.is_causal = kernel, is_causal
        ctx.save_for_backward(query, key, value, mask, out, logarithms)
        # Two products, of queries and keys and of weights and values, and two operations a product and sum.
        _tell(2 * (query.shape[-1] + value.shape[-1]), is_causal, query, key, value, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, out, logarithms = ctx.saved_tensors
        # Sums of gradient times output, one a row of the logarithms, live as long as the kernel runs.
        temporaries = [torch.empty_like(logarithms)]
        if ctx.kernel == "flash":
            temporaries.append(torch.empty_like(query, dtype=torch.float32))  # the queries' gradient, summed in fp32
            if query.shape[1] != key.shape[1]:
                by_query_head = (query.shape[0], query.shape[1], key.shape[2], key.shape[3])
                temporaries += [key.new_empty(by_query_head), value.new_empty(by_query_head)]
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        # Five products: the scores again, and the gradients of weights, values, queries and keys.
        flops_per_score = 2 * (3 * query.shape[-1] + 2 * value.shape[-1])
        _tell(flops_per_score, ctx.is_causal, query, key, value, out, gradient, *gradients)
        return *gradients, None, None, None


def kernels_of(kernels: Kernels) -> TorchFunctionMode:
    """Let torch's functions keep what they would keep on a GPU, or what they do keep on the CPU.

    Args:
        kernels: Whose.
    """
    return GpuKernels() if kernels == "gpu" else KnownKernels()


class KnownKernels(TorchFunctionMode):
    """While entered, torch knows all functions without data; a context manager.

    No one's code is changed: the mode sees each call of a torch function and answers those that it has to.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is GROUPED_PRODUCT:
            return multiply_in_groups(*args, **(kwargs or {}), tell=tell_listeners)
        return func(*args, **(kwargs or {}))


class GpuKernels(KnownKernels):
    """While entered, torch's functions also keep what they would keep on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attend(*map(_in_autocast_dtype, args), **{key: _in_autocast_dtype(kwargs[key]) for key in kwargs})
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_in_fp32, args), **{key: _in_fp32(value) for key, value in kwargs.items()})
        return super().__torch_function__(func, types, args, kwargs)


# https://docs.pytorch.org/docs/2.13/amp.html: "CUDA Ops that can autocast to float32", as far as language models call
# them; the CPU's autocast leaves these in bf16.
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
    """As the fused kernel of a GPU: a mask of one byte an element, where the CPU keeps the noise itself."""
    if not training or p == 0:
        return input
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(output) if inplace else output
