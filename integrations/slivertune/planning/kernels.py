"""What a GPU's kernels keep and take, for a step that runs on the CPU.

A plan's tensors say that they lie on the CPU, so torch would give them the CPU's operators. Three of these keep other
things for the backward than those of a GPU, and are answered here in their place: attention, dropout, and what autocast
computes in fp32. All else is the same on both.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from slivertune.planning.attention import attend


class GpuKernels(TorchFunctionMode):
    """While entered, torch's functions keep what they would keep on a GPU; a context manager.

    No one's code is changed: the mode sees each call of a torch function and answers those that differ.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attend(*_in_autocast_dtype(args), **_by_name_in_autocast_dtype(kwargs))
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_in_fp32, args), **{key: _in_fp32(value) for key, value in kwargs.items()})
        return func(*args, **kwargs)


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


def _in_autocast_dtype(values: tuple[Any, ...]) -> list[Any]:
    if not torch.is_autocast_enabled("cpu"):
        return list(values)
    dtype = torch.get_autocast_dtype("cpu")
    return [
        value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in values
    ]


def _by_name_in_autocast_dtype(values: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(values, _in_autocast_dtype(tuple(values.values())), strict=True))


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
