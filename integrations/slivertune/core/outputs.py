"""Find and replace the tensors in a model's output."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nest of mappings, sequences, dataclasses and namespaces, or in an object's attributes.

    Args:
        output: Output of a module's forward.
    """
    is_object = not _entries(output) and hasattr(output, "__dict__") and not isinstance(output, torch.Tensor)
    yield from _tensors_of(vars(output) if is_object else output)


def _tensors_of(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    else:
        for _, value in _entries(output):
            yield from _tensors_of(value)


def with_tensors_replaced(output: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in a nest. Containers without a replaced tensor stay the same objects.

    Args:
        output: Output of a module's forward.
        replace: Function from a tensor to its replacement, or to the tensor itself to leave it.
    """
    if isinstance(output, torch.Tensor):
        return replace(output)
    changed = {}
    for key, value in _entries(output):
        new = with_tensors_replaced(value, replace)
        if new is not value:
            changed[key] = new
    return _with_entries(output, changed) if changed else output


def _entries(output: Any) -> list[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, tuple | list):
        return list(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    if isinstance(output, SimpleNamespace):
        return list(vars(output).items())
    return []


def _with_entries(output: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(output, tuple):
        values = [changed.get(index, value) for index, value in enumerate(output)]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    copied = copy.copy(output)
    for key, value in changed.items():
        if isinstance(output, Mapping | list):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)
    return copied
