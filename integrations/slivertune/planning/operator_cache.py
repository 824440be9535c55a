"""Fake tensors whose operators are cached by the forms of their inputs.

A model's blocks are alike, so a plan repeats nearly every operator. torch's own `FakeTensorMode` has a cache as well,
but also checks cases that plans never have (symbolic sizes, sparse tensors, tracing). A look-up here takes a quarter of
the time. Uncertain cases are left to torch: operators of other libraries, results that depend on values, inputs whose
values torch remembers, and results that share an input's memory without being views.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.torch_internals import (
    ASKS_FOR_DEVICE,
    UNNAMED_VIEW,
    FakeTensor,
    FakeTensorMode,
    fake_tensor,
    storage_key,
)

_Make = Callable[[Sequence[Any]], Any]
"""Function that makes an operator's result from its positional arguments."""

_PLAIN = frozenset(
    {
        bool,
        complex,
        float,
        int,
        str,
        type(None),
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
    }
)
_VIEW_BY_STRIDES = torch.ops.aten.as_strided.default
_LARGEST_ITEM = 16
"""Bytes per element of the largest dtype."""
_NEVER_KNOWN = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})


class CachedFakeTensorMode(FakeTensorMode):
    """`FakeTensorMode` that runs an operator once for inputs of the same forms."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[Any, ...], _Make] = {}

    @override
    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) != "aten":
            return super().dispatch(func, types, args, kwargs)
        is_view = func.is_view or func is UNNAMED_VIEW
        # A Python number takes the default dtype.
        key: list[Any] = [func, torch.get_default_dtype()]
        try:
            _add_forms(key, args)
            for name, value in kwargs.items():
                key.append(name)
                _add_forms(key, (value,))
            if is_view:
                key.append(_place_of(func, args[0]))
        except _NoFormError:
            return super().dispatch(func, types, args, kwargs)
        make = self._known.get(tuple(key))
        if make is not None:
            return make(args)
        result = super().dispatch(func, types, args, kwargs)
        make = None if _NEVER_KNOWN.intersection(func.tags) else self._maker(result, args, kwargs, is_view)
        if make is not None:
            self._known[tuple(key)] = make
        return result

    def _maker(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_view: bool) -> _Make | None:
        """Return a function that makes such a result again, or None if that is not certain."""
        if result is None:
            return lambda args: None
        if isinstance(result, (tuple, list)):
            makers = [self._maker(each, args, kwargs, is_view) for each in result]
            known = [each for each in makers if each is not None]
            collect = getattr(type(result), "_make", type(result))  # named tuples take their values one by one
            return None if len(known) < len(makers) else lambda args: collect(make(args) for make in known)
        if type(result) is not FakeTensor or not _is_plain(result):
            return None
        for place, argument in enumerate(args):
            if argument is result:
                return lambda args: args[place]
        return self._maker_of_tensor(result, args, kwargs, is_view)

    def _maker_of_tensor(
        self, result: FakeTensor, args: Sequence[Any], kwargs: Mapping[str, Any], is_view: bool
    ) -> _Make | None:
        form = (tuple(result.shape), result.stride(), result.dtype, result.fake_device)
        memory = storage_key(result.untyped_storage())
        if is_view:
            if not isinstance(args[0], FakeTensor) or storage_key(args[0].untyped_storage()) != memory:
                return None
            distance = _first_byte(result) - _first_byte(args[0])
            return lambda args: self._view(args[0], form, distance)
        if any(storage_key(each.untyped_storage()) == memory for each in _tensors((*args, *kwargs.values()))):
            return None
        # An operator may pad its result. A new tensor of the same strides has no padding.
        if fake_tensor(self, *form).untyped_storage().nbytes() != result.untyped_storage().nbytes():
            return None
        return lambda args: fake_tensor(self, *form)

    def _view(self, base: FakeTensor, form: Any, distance: int) -> FakeTensor:
        """Return a view that begins `distance` bytes after its base."""
        offset = (_first_byte(base) + distance) // form[2].itemsize
        return fake_tensor(self, *form, storage=base.untyped_storage(), offset=offset)


class _NoFormError(Exception):
    """The form of an argument does not determine an operator's result."""


def _add_forms(key: list[Any], values: Iterable[Any]) -> None:
    """Append the properties of values that determine the form of an operator's result.

    Raises:
        _NoFormError: If torch knows a value, or its type is not supported here.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or not _is_plain(value):
                raise _NoFormError
            key += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal, but make different dtypes
        elif kind is list or kind is tuple:
            key.append(len(value))
            _add_forms(key, value)
        else:
            raise _NoFormError


def _place_of(func: Any, base: Any) -> int:
    """Return the part of a base's offset that determines its view, besides moving the view along."""
    if type(base) is not FakeTensor:
        raise _NoFormError
    if func is _VIEW_BY_STRIDES:
        return int(base.storage_offset())  # its offset counts from the start of the storage
    return _first_byte(base) % _LARGEST_ITEM  # a view as another dtype must start at one of its elements


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
