"""State-dict entries of quantised weights, which read the exact weight when it is needed.

A state dict of exact weights would take as much memory as the model, at once. These are read one by one, by any
operation that computes with them, copies or saves them, so that `save_pretrained` has one shard at a time in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from typing_extensions import override

from slivertune.core.torch_internals import make_subclass, plain_tensor_functions, tree_leaves, tree_map

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
        # Programs find shared tensors by address, and copy a tensor that is not contiguous before they save it.
        torch.Tensor.data_ptr,
        torch.Tensor.is_contiguous,
        torch.Tensor.stride,
        torch.Tensor.storage_offset,
    )
)
"""Functions that need no values."""
_KEEPS_THE_ENTRY = frozenset((torch.Tensor.detach, torch.Tensor.data.__get__))  # type: ignore[attr-defined]
"""Functions whose result shares a tensor's memory: whoever writes there has to be refused, too."""
_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WRITES_NO_VALUES = frozenset(("requires_grad_", "detach_", "share_memory_"))


@dataclass(frozen=True, slots=True)
class _Extent:
    """A storage of the values' size, without them."""

    address: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.num_bytes

    def size(self) -> int:
        return self.num_bytes


class ExactTensor(torch.Tensor):
    """A weight's shape and dtype, with a function that reads it for every operator. Made by `of`."""

    _read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, form: torch.Tensor, read: Callable[[], torch.Tensor]) -> Self:
        """Build the entry of a weight.

        Args:
            form: Tensor of the weight's shape and dtype.
            read: Function that returns the values, on the host.
        """
        # Each has one element of its own: programs find tied weights by the addresses of storages.
        element = torch.zeros((), dtype=form.dtype, device="cpu").expand(form.shape)
        made: Self = make_subclass(cls, element)
        made._read = read
        return made

    def values(self) -> torch.Tensor:
        """Return a copy of the exact weight, in host memory."""
        return self._read().detach().to("cpu", copy=True)

    @override
    def untyped_storage(self) -> Any:
        """Return the storage's address and size, for programs that find shared tensors or count bytes."""
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
        if func in _KEEPS_THE_ENTRY:
            return args[0]
        if _writes_to_entry(func, args, kwargs or {}):
            raise RuntimeError(
                f"{func.__name__} would write to the entry of a quantised weight in a state dict, which is read from "
                "the exact weight when it is needed. Write with model.load_state_dict(...), from a state dict of your "
                "own or one whose entries were cloned ({name: each.clone() for name, each in state_dict.items()})"
            )
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


def _writes_to_entry(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    is_in_place |= name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    is_in_place |= func == _SETS_DATA
    targets = (args[:1], *(kwargs.get(each) for each in ("input", "self", "tensor")))  # an initialiser's is named
    written = [targets if is_in_place and name not in _WRITES_NO_VALUES else (), kwargs.get("out", ())]
    return any(isinstance(each, ExactTensor) for each in tree_leaves(written))
