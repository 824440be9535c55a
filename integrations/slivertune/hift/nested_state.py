"""Take optimizer state with nested tensors apart into plain tensors, which can be offloaded, and put it back together.

Nested tensors are in tensor subclasses (torchao's 8-bit, 4-bit and fp8 moments, DTensors), in lists, tuples and
dictionaries of tensors, and among the attributes of objects (GaLore's projectors).
"""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.torch_internals import FakeTensor, is_traceable_wrapper_subclass

_SEPARATOR = "/"
_SEQUENCES = (list, tuple, deque)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class UnsupportedStateError(ValueError):
    """Error of a base optimizer whose state can't be moved from where it was made."""


@dataclass(frozen=True, slots=True)
class _Inner:
    """Place of a tensor in a value."""

    key: str
    """Key of the plain tensor."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A value without its tensors."""

    parts: dict[Any, Any]
    """Contents by name: an `_Inner`, a `Structure`, or a value without tensors."""
    build: Callable[[dict[Any, Any]], Any]
    """Function that builds such a value from other parts."""
    of_object: Any = None
    """Object whose attributes are the parts, if there is one. It gets other tensors and keeps its identity."""
    is_subclass: bool = False
    """Whether the value is a tensor with tensors inside."""


def flatten_state(state: dict[str, Any], *, copy_objects: bool = False) -> dict[str, Any]:
    """Take one weight's state apart.

    Args:
        state: State by key.
        copy_objects: Whether objects that hold tensors are copied, so that the given ones are never written to.

    Returns:
        State in which every value with nested tensors is a `Structure`, followed by its plain tensors under
        `key/path`. No tensor is copied.

    Raises:
        UnsupportedStateError: If a tensor is sparse, or of a subclass that does not tell its parts.
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and _is_plain(value):
            flat[key] = value
            continue
        tensors: dict[str, torch.Tensor] = {}
        apart = _take_apart(value, key, tensors, copy_objects)
        flat[key] = apart if tensors else value
        flat.update(tensors)
    return flat


def unflatten_state(flat: dict[str, Any], *, copy_objects: bool = False) -> dict[str, Any]:
    """Put state together that `flatten_state` took apart, with the tensors that are now in place of the old ones.

    Args:
        flat: State as returned, with tensors moved or replaced.
        copy_objects: Whether objects are returned as copies. Otherwise their attributes are set, in place.
    """
    nested = {key for key, value in flat.items() if isinstance(value, Structure)}
    if not nested:
        return dict(flat)
    return {
        key: _put_together(value, flat, copy_objects)
        for key, value in flat.items()
        if key in nested or key.partition(_SEPARATOR)[0] not in nested
    }


def empty_objects(flat: dict[Any, Any]) -> None:
    """Remove from objects the tensors that were taken out of them. `unflatten_state` gives them others."""
    for value in flat.values():
        if isinstance(value, Structure):
            if value.of_object is not None:
                vars(value.of_object).update(dict.fromkeys(value.parts))
            empty_objects(value.parts)


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor], copy_objects: bool) -> Any:
    """Return an `_Inner`, a `Structure`, or the value itself if no tensor can be inside of it."""

    def inside(parts: dict[Any, Any]) -> dict[Any, Any]:
        return {
            name: _take_apart(part, f"{path}{_SEPARATOR}{name}", tensors, copy_objects) for name, part in parts.items()
        }

    if isinstance(value, torch.Tensor):
        if _is_plain(value):
            tensors[path] = value
            return _Inner(path)
        return _take_tensor_apart(value, path, inside)
    # `build` must not hold the tensors that were taken out.
    kind = type(value)
    if isinstance(value, dict):
        return Structure(inside(value), partial(_with_items, _with_items(value, {})))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Structure(inside(dict(enumerate(value))), lambda parts: kind(*parts.values()))
    if kind in _SEQUENCES:
        return Structure(inside(dict(enumerate(value))), lambda parts: kind(parts.values()))
    # The state must not move the tensors of a module or an optimizer.
    if not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module, torch.optim.Optimizer)):
        return value
    attributes = {}
    for name, part in vars(value).items():
        if isinstance(part, (torch.Tensor, dict, *_SEQUENCES)):
            before = len(tensors)
            apart = inside({name: part})
            if len(tensors) > before:
                attributes.update(apart)
    if not attributes:
        return value
    owner = copy.copy(value) if copy_objects else value
    return Structure(attributes, partial(_with_attributes, owner), of_object=owner)


def _take_tensor_apart(value: torch.Tensor, path: str, inside: Callable[[dict[Any, Any]], dict[Any, Any]]) -> Structure:
    kind = type(value)
    if value.layout != torch.strided:
        raise UnsupportedStateError(f"{path!r} is a tensor of layout {value.layout}")
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        tensors = {name: part for name, part in inner.items() if isinstance(part, torch.Tensor)}
        # A part that is not a tensor (a DTensor's mesh) is not this state's alone.
        others = {name: part for name, part in inner.items() if name not in tensors}
        size, stride = value.size(), value.stride()
        return Structure(
            inside(tensors),
            lambda parts: kind.__tensor_unflatten__({**others, **parts}, context, size, stride),
            is_subclass=True,
        )
    if not _has_memory(value):
        raise UnsupportedStateError(f"{path!r} is a {kind.__name__}, a tensor subclass without __tensor_flatten__")
    attributes = dict(vars(value))
    return Structure(
        inside({"data": value.as_subclass(torch.Tensor)}),
        lambda parts: _with_attributes(parts["data"].as_subclass(kind), attributes),
    )


def _put_together(apart: Any, flat: dict[str, Any], copy_objects: bool) -> Any:
    if isinstance(apart, _Inner):
        return flat[apart.key]
    if not isinstance(apart, Structure):
        return apart
    parts = {name: _put_together(part, flat, copy_objects) for name, part in apart.parts.items()}
    if copy_objects and apart.of_object is not None:
        return _with_attributes(copy.copy(apart.of_object), parts)
    return apart.build(parts)


def _with_items(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary of the same class (and default factory) with other items."""
    made = copy.copy(like)
    made.clear()
    made.update(items)
    return made


def _with_attributes(value: Any, attributes: dict[str, Any]) -> Any:
    vars(value).update(attributes)
    return value


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor can be copied into any memory of its dtype and size, or is a fake of such a tensor."""
    return (type(value) in _PLAIN or isinstance(value, FakeTensor)) and value.layout == torch.strided


def _has_memory(value: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are in its own storage, and not in a tensor that it wraps."""
    try:
        return value.numel() == 0 or value.data_ptr() != 0
    except RuntimeError:  # no storage at all
        return False
