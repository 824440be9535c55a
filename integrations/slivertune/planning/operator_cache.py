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

UNKNOWN = object()
"""Result of an operator that did not run yet."""
_Make = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Function that makes an operator's result from its arguments."""

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
_SLICE = torch.ops.aten.slice.Tensor
_WITH_ANY_NUMBER = frozenset(
    {
        getattr(getattr(torch.ops.aten, name), overload)
        for name, overload in (
            ("eq", "Scalar"),
            ("ne", "Scalar"),
            ("lt", "Scalar"),
            ("le", "Scalar"),
            ("gt", "Scalar"),
            ("ge", "Scalar"),
            ("add", "Tensor"),
            ("sub", "Tensor"),
            ("mul", "Tensor"),
            ("div", "Tensor"),
        )
    }
)
"""Operators whose results have the same form whatever the value of a number is."""
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
        key, found = self._look_up(func, args, kwargs)
        if found is not UNKNOWN:
            return found
        given = _sizes(kwargs)
        result = super().dispatch(func, types, args, kwargs)
        may_be_known = not _NEVER_KNOWN.intersection(func.tags)
        # torch resizes a result's place that is too small.
        if key is not None and may_be_known and _sizes(kwargs) == given:
            make = self._maker(result, args, kwargs, _is_view(func))
            if make is not None:
                self._known[key] = make
        return result

    def made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator that ran before on inputs of the same forms, or `UNKNOWN`.

        Args:
            func: Operator.
            args: Its positional arguments.
            kwargs: Its other arguments.
        """
        return self._look_up(func, args, kwargs)[1]

    def _look_up(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...] | None, Any]:
        """Return what determines the form of an operator's result, if that is certain, and the result or `UNKNOWN`."""
        if func is _SLICE and (found := self._slice(*args, **kwargs)) is not None:
            return None, found
        key = _key_of(func, args, kwargs)
        make = None if key is None else self._known.get(key)
        return key, UNKNOWN if make is None else make(args, kwargs)

    def _slice(self, base: Any, dim: int = 0, start: Any = None, stop: Any = None, step: Any = 1) -> FakeTensor | None:
        """Return a slice of a tensor, of which there is one for each place, or None if torch has to make it."""
        if type(base) is not FakeTensor or base.constant is not None or not _is_plain(base) or not base.dim():
            return None
        if not all(type(each) in (int, type(None)) for each in (dim, start, stop, step)):
            return None
        if not -base.dim() <= dim < base.dim() or (step is not None and step < 1):
            return None  # an error of torch's
        shape, stride = list(base.shape), list(base.stride())
        first, last, step = slice(start, stop, step).indices(shape[dim])
        distance = first * stride[dim] * base.dtype.itemsize
        shape[dim], stride[dim] = len(range(first, last, step)), stride[dim] * step
        return self._view(base, (tuple(shape), tuple(stride), base.dtype, base.fake_device), distance)

    def _maker(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_view: bool) -> _Make | None:
        """Return a function that makes such a result again, or None if that is not certain."""
        if result is None:
            return lambda args, kwargs: None
        if isinstance(result, (tuple, list)):
            makers = [self._maker(each, args, kwargs, is_view) for each in result]
            known = [each for each in makers if each is not None]
            collect = getattr(type(result), "_make", type(result))  # named tuples take their values one by one
            if len(known) < len(makers):
                return None
            return lambda args, kwargs: collect(make(args, kwargs) for make in known)
        if type(result) is not FakeTensor or not _is_plain(result):
            return None
        for place, argument in enumerate(args):
            if argument is result:
                return lambda args, kwargs: args[place]
        for name, argument in kwargs.items():
            if argument is result:
                return lambda args, kwargs: kwargs[name]
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
            return lambda args, kwargs: self._view(args[0], form, distance)
        if any(storage_key(each.untyped_storage()) == memory for each in _tensors((*args, *kwargs.values()))):
            return None
        # An operator may pad its result. A new tensor of the same strides has no padding.
        if fake_tensor(self, *form).untyped_storage().nbytes() != result.untyped_storage().nbytes():
            return None
        return lambda args, kwargs: fake_tensor(self, *form)

    def _view(self, base: FakeTensor, form: Any, distance: int) -> FakeTensor:
        """Return a view that begins `distance` bytes after its base."""
        offset = (_first_byte(base) + distance) // form[2].itemsize
        return fake_tensor(self, *form, storage=base.untyped_storage(), offset=offset)


def _sizes(values: Mapping[str, Any]) -> list[Any]:
    """Return the sizes of tensors and of their memory, which an operator may change."""
    return [(each.shape, each.stride(), each.untyped_storage().nbytes()) for each in _tensors(values.values())]


def _is_view(func: Any) -> bool:
    return func.is_view or func is UNNAMED_VIEW


def _key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what determines the form of an operator's result, or None if that is not certain."""
    if getattr(func, "namespace", None) != "aten":
        return None
    # A Python number takes the default dtype.
    key: list[Any] = [func, torch.get_default_dtype()]
    try:
        _add_forms(key, args, are_numbers_alike=func in _WITH_ANY_NUMBER)
        for name, value in kwargs.items():
            key.append(name)
            _add_forms(key, (value,))
        if _is_view(func):
            key.append(_place_of(func, args[0]))
    except _NoFormError:
        return None
    return tuple(key)


class _NoFormError(Exception):
    """The form of an argument does not determine an operator's result."""


def _add_forms(key: list[Any], values: Iterable[Any], *, are_numbers_alike: bool = False) -> None:
    """Append the properties of values that determine the form of an operator's result.

    Args:
        key: List to append to.
        values: Arguments of the operator.
        are_numbers_alike: Whether any number of the same type makes the same form.

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
            is_any = are_numbers_alike and kind in (int, float)
            key += (kind, None if is_any else value)  # 1, 1.0 and True are equal, but make different dtypes
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
