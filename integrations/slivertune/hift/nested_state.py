"""Optimizer state that holds its tensors inside: taken apart into plain tensors, which can wait anywhere, and put back.

Tensor subclasses (torchao's 8-bit, 4-bit and fp8 moments, DTensors), lists, tuples and dictionaries of tensors, and
objects with tensors among their attributes (GaLore's projectors).
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slivertune.core.torch_internals import FakeTensor, is_traceable_wrapper_subclass

_SEPARATOR = "/"
_SEQUENCES = (list, tuple, deque)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class UnsupportedStateError(ValueError):
    """A base optimizer keeps state that can't wait anywhere but where it was made."""


@dataclass(frozen=True, slots=True)
class _Inner:
    """Where a tensor was."""

    key: str
    """Key of the plain tensor."""


@dataclass(frozen=True, slots=True)
class _Subclass:
    """A wrapper, which consists of the tensors that it names."""

    type: Any
    context: Any
    inner: dict[str, Any]
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _AttributedTensor:
    """A plain tensor with a type and attributes of its own."""

    type: type[torch.Tensor]
    attributes: dict[str, Any]
    inner: _Inner


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of any class; its attributes that hold tensors."""

    value: Any
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Structure:
    """What is left of a value once its tensors are taken out."""

    template: Any

    @property
    def is_subclass(self) -> bool:
        """Whether the value itself is a tensor with an inside of its own."""
        return isinstance(self.template, _Subclass)


def flatten_state(state: dict[str, Any], *, copy_objects: bool = False) -> dict[str, Any]:
    """Take one weight's state apart.

    Args:
        state: By key.
        copy_objects: Whether objects that hold tensors are copied, so that the given ones are never written to.

    Returns:
        The same, but every value with tensors inside is a `Structure`, followed by its plain tensors under
        `key/path`. No tensor is copied.

    Raises:
        UnsupportedStateError: If a tensor is sparse, or of a subclass that does not tell what it consists of.
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and _is_plain(value):
            flat[key] = value
            continue
        tensors: dict[str, torch.Tensor] = {}
        template = _take_apart(value, key, tensors, copy_objects)
        flat[key] = Structure(template) if tensors else value
        flat.update(tensors)
    return flat


def unflatten_state(flat: dict[str, Any], *, copy_objects: bool = False) -> dict[str, Any]:
    """Put together what `flatten_state` took apart, with whatever tensors stand in place of the old ones.

    Args:
        flat: As returned, its tensors moved or replaced.
        copy_objects: Whether objects are returned as copies; else their attributes are set, and they stay the same.
    """
    nested = {key for key, value in flat.items() if isinstance(value, Structure)}
    return {
        key: _put_together(value.template, flat, copy_objects) if key in nested else value
        for key, value in flat.items()
        if key in nested or key.partition(_SEPARATOR)[0] not in nested
    }


def empty_objects(flat: dict[str, Any]) -> None:
    """Let objects drop the tensors that were taken out of them; `unflatten_state` gives them others."""
    for value in flat.values():
        if isinstance(value, Structure):
            for part in _parts(value.template):
                if isinstance(part, _Object):
                    vars(part.value).update(dict.fromkeys(part.attributes))


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor], copy_objects: bool) -> Any:
    def inside(part: Any, name: object) -> Any:
        return _take_apart(part, f"{path}{_SEPARATOR}{name}", tensors, copy_objects)

    if isinstance(value, torch.Tensor):
        return _take_tensor_apart(value, path, tensors, inside)
    if isinstance(value, dict):
        return _with_items(value, [(key, inside(part, key)) for key, part in value.items()])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(inside(part, index) for index, part in enumerate(value)))
    if type(value) in _SEQUENCES:
        return type(value)(inside(part, index) for index, part in enumerate(value))
    if not _may_hold_tensors(value):
        return value
    attributes = {}
    for name, part in vars(value).items():
        if isinstance(part, (torch.Tensor, dict, *_SEQUENCES)):
            before = len(tensors)
            template = inside(part, name)
            if len(tensors) > before:
                attributes[name] = template
    return _Object(copy.copy(value) if copy_objects else value, attributes) if attributes else value


def _take_tensor_apart(
    value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], inside: Callable[[Any, str], Any]
) -> Any:
    if value.layout != torch.strided:
        raise UnsupportedStateError(f"{path!r} is a tensor of layout {value.layout}")
    if _is_plain(value):
        tensors[path] = value
        return _Inner(path)
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        # What is no tensor (a DTensor's mesh) is not this state's alone.
        inner = {name: inside(part, name) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        return _Subclass(type(value), context, inner, value.size(), value.stride())
    if not _has_memory(value):
        raise UnsupportedStateError(
            f"{path!r} is a {type(value).__name__}, a tensor subclass without __tensor_flatten__"
        )
    return _AttributedTensor(type(value), dict(vars(value)), inside(value.as_subclass(torch.Tensor), "data"))


def _put_together(template: Any, flat: dict[str, Any], copy_objects: bool) -> Any:
    def whole(part: Any) -> Any:
        return _put_together(part, flat, copy_objects)

    if isinstance(template, _Inner):
        return flat[template.key]
    if isinstance(template, _Subclass):
        inner = {name: whole(part) for name, part in template.inner.items()}
        return template.type.__tensor_unflatten__(inner, template.context, template.size, template.stride)
    if isinstance(template, _AttributedTensor):
        tensor = whole(template.inner).as_subclass(template.type)
        vars(tensor).update(template.attributes)
        return tensor
    if isinstance(template, _Object):
        value = copy.copy(template.value) if copy_objects else template.value
        vars(value).update({name: whole(part) for name, part in template.attributes.items()})
        return value
    if isinstance(template, dict):
        return _with_items(template, [(key, whole(part)) for key, part in template.items()])
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*map(whole, template))
    if type(template) in _SEQUENCES:
        return type(template)(map(whole, template))
    return template


def _parts(template: Any) -> Iterator[Any]:
    """A template and all templates inside of it."""
    yield template
    inside: Any = ()
    if isinstance(template, _Subclass):
        inside = template.inner.values()
    elif isinstance(template, _AttributedTensor):
        inside = (template.inner,)
    elif isinstance(template, _Object):
        inside = template.attributes.values()
    elif isinstance(template, dict):
        inside = template.values()
    elif type(template) in _SEQUENCES or isinstance(template, tuple):
        inside = template
    for part in inside:
        yield from _parts(part)


def _with_items(like: dict[Any, Any], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dictionary of the same class (and default factory) with other items."""
    made = copy.copy(like)
    made.clear()
    made.update(items)
    return made


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor can be copied into any memory of its dtype and size; fake ones stand for such tensors."""
    return (type(value) in _PLAIN or isinstance(value, FakeTensor)) and value.layout == torch.strided


def _has_memory(value: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie in its own storage, and not in what it wraps."""
    try:
        return value.numel() == 0 or value.data_ptr() != 0
    except RuntimeError:  # no storage at all
        return False


def _may_hold_tensors(value: Any) -> bool:
    # A module's and an optimizer's tensors are not the state's to move.
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, torch.optim.Optimizer))
