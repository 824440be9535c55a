"""What a state dict shows in place of a weight that waits in fewer bits: the exact weight, read when it is needed.

A whole state dict of exact weights would take a model's size of memory at once. These are read one by one, by whatever
computes with them, copies or saves them, so that `save_pretrained` has one shard at a time in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from typing_extensions import override

from slivertune.core.torch_internals import make_subclass, plain_tensor_functions, tree_map

_OF_THE_FORM = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim")
) | frozenset(
    (
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.__len__,
        # Programs tell shared tensors by their places, and what is not contiguous they copy before they save it.
        torch.Tensor.data_ptr,
        torch.Tensor.is_contiguous,
        torch.Tensor.stride,
        torch.Tensor.storage_offset,
    )
)
"""What is known without the values."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """A storage as large as the values, without them."""

    address: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.num_bytes

    def size(self) -> int:
        return self.num_bytes


class ExactTensor(torch.Tensor):
    """A weight's shape and dtype, and how to read it; every operator gets what is read. Made by `of`."""

    _read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, form: torch.Tensor, read: Callable[[], torch.Tensor]) -> Self:
        """Make one.

        Args:
            form: Of its shape and dtype.
            read: Gives the values, on the host.
        """
        # One element of its own: programs that look for tied weights compare the places of storages.
        element = torch.zeros((), dtype=form.dtype, device="cpu").expand(form.shape)
        made: Self = make_subclass(cls, element)
        made._read = read
        return made

    def values(self) -> torch.Tensor:
        """A copy of the exact weight, in host memory."""
        return self._read().detach().to("cpu", copy=True)

    @override
    def untyped_storage(self) -> Any:
        """What programs ask that look for shared tensors, or count bytes before they save."""
        with plain_tensor_functions():
            return _Extent(self.data_ptr(), self.numel() * self.element_size())

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_THE_FORM:
            with plain_tensor_functions():
                return func(*args, **(kwargs or {}))
        read = tree_map(
            lambda each: each.values() if isinstance(each, ExactTensor) else each, (args, dict(kwargs or {}))
        )
        return func(*read[0], **read[1])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.values()
        memo[id(self)] = copied
        return copied
