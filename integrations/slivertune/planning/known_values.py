"""Known values of fake tensors: values that follow from sizes and positions alone.

The sizes in a vision model depend on integers: positions of an image's patches, tokens that stand for the image, and
windows into which they are cut. These integers depend on no weight, so they are computed next to their fake tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from slivertune.core.torch_internals import (
    READS_A_VALUE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    arguments_of,
    outside_of_modes,
    tree_leaves,
    tree_map,
)

_LARGEST = 2**18
"""Largest number of elements of a tensor whose values are computed."""

_values: Any = WeakTensorKeyDictionary()


def set_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Set the values that a fake tensor would hold, and return the tensor.

    Args:
        tensor: Fake tensor.
        values: Real tensor of the same shape.
    """
    _values[tensor] = values
    return tensor


class KnownValues(TorchDispatchMode):
    """Context manager in which operators on tensors of known values have known results, which `item` reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not all(map(_is_known, tensors)):
            for tensor in _written(func, args):
                _values.pop(tensor, None)
            return func(*args, **kwargs)
        if func is READS_A_VALUE:
            with outside_of_modes():
                return _values[args[0]].item()
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not tensors:
                raise
            return tree_map(_without_data(tensors[0]), _computed(func, args, kwargs))
        results = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if results and all(each.numel() <= _LARGEST for each in results) and _is_determined(func, results):
            for tensor, values in zip(results, tree_leaves(_computed(func, args, kwargs)), strict=True):
                _values[tensor] = values
        return out


def _is_known(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are known. A tensor that was just made from a list holds them itself."""
    return tensor in _values or not isinstance(tensor, FakeTensor)


def _is_determined(func: Any, results: list[torch.Tensor]) -> bool:
    """Return whether values are worth computing: none are random, and none are uninitialized memory."""
    name = func.overloadpacket.__name__
    return not (name.startswith(("empty", "new_empty", "rand", "normal", "uniform", "bernoulli", "native_dropout")))


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    def real(value: Any) -> Any:
        return _values[value] if isinstance(value, FakeTensor) else value

    with outside_of_modes():
        return func(*tree_map(real, args), **tree_map(real, kwargs))


def _without_data(like: torch.Tensor) -> Any:
    def make(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return set_values(like.new_empty(value.shape, dtype=value.dtype), value)

    return make


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value, (_, is_written) in zip(args, arguments_of(func), strict=False):
        if is_written and isinstance(value, torch.Tensor):
            yield value


@contextmanager
def knowing(enabled: bool) -> Iterator[None]:
    """Compute known values inside this context, if enabled.

    Args:
        enabled: Whether to compute them.
    """
    if not enabled:
        yield
        return
    with KnownValues():
        yield
