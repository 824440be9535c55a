"""Find what an operator touches: its tensors, their bytes, and whether the host waits for its result."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

Span = tuple[int, int]
"""First address, and the one behind the last."""

_FORM_ALONE = frozenset({"empty_like", "new_empty", "new_zeros", "new_full", "zeros_like", "ones_like", "full_like"})
"""Operators that take from their inputs nothing but shape and dtype."""
_NO_ACCESS = _FORM_ALONE | {"record_stream"}
COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_", "_copy_from"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_WAITING = frozenset(
    {
        *("_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("bincount", "equal", "histc", "is_nonzero"),
    }
)
"""Operators whose result, or its size, the host always reads from the device."""
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that have memory of their own, and wrap no other."""


class Access(NamedTuple):
    """A tensor that is touched."""

    tensor: torch.Tensor
    device: int
    """Number of its CUDA device, -1 for the host's memory."""
    storage: int
    """First address of its storage."""
    span: Span
    """From its first byte to its last, empty if it has none."""
    written: bool


def access(tensor: torch.Tensor, written: bool) -> Access:
    """Say what of memory a tensor is."""
    storage = tensor.untyped_storage().data_ptr()
    return Access(tensor, tensor.get_device(), storage, span_of(tensor) if tensor.numel() else (0, 0), written)


class Operator(NamedTuple):
    """An operator, whatever it is called with."""

    name: str
    """Without the overload's."""
    arguments: tuple[tuple[int, str, bool], ...]
    """Arguments that hold tensors: place, name, whether they are written."""
    is_view: bool
    has_access: bool
    """Whether it touches what its inputs hold."""
    is_collective: bool


class Call(NamedTuple):
    """An operator that has run, with its arguments and result."""

    func: Any
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """Name without the overload's."""
        return self.operator.name


@cache
def operator_of(func: Any) -> Operator:
    """Return what is known of an operator of torch's."""
    name = str(func.overloadpacket.__name__)
    return Operator(
        name,
        tuple(
            (position, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
            for position, argument in enumerate(func._schema.arguments)
            if "Tensor" in str(argument.type)
        ),
        func.is_view,
        name not in _NO_ACCESS,
        func.namespace == "_c10d_functional",
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an operator's argument or result, but those without memory."""
    if type(value) in PLAIN:
        return [] if value.is_meta else [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, list | tuple) else []


def span_of(tensor: torch.Tensor) -> Span:
    """From the tensor's first byte to its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return (start, start + tensor.nbytes)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (start, start + (last + 1) * tensor.itemsize)


def overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def reads_size(call: Call) -> bool:
    """Whether the host reads an operator's result, or its size, from the device, or uploads its indices."""
    if call.name == "repeat_interleave":
        return call.kwargs.get("output_size") is None
    if call.name not in _INDEXING:
        return call.name in _WAITING
    indices = tensors_in(call.args[1])
    by_booleans = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if call.name != "index" and len(by_booleans) == len(indices) == 1 and call.args[2].numel() == 1:
        return False  # filled where the mask is true
    return bool(by_booleans) or any(index.device.type == "cpu" for index in indices)
