"""Whether a hooked model is still the one that was hooked: the same modules, and the same attention."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from slivertune.core.torch_internals import children_of
from slivertune.core.transformers_internals import attention_of
from slivertune.tokentune.wrapping import TokenWise


def model_check(
    layers: nn.ModuleList,
    parent: nn.Module,
    wrapped: Sequence[TokenWise],
    configs: Iterable[Any],
    has_attention: Callable[[], bool],
) -> Callable[[], None]:
    """What looks at a model before each training forward; a walk over the modules that hold others.

    Args:
        layers: The model's list of layers.
        parent: The module that has it.
        wrapped: Modules whose forward was replaced.
        configs: Of the model and its attention modules.
        has_attention: Whether the functions that intercept the attention are still in place.

    Returns:
        Compares the model with what it is now. It raises a RuntimeError if a module was replaced, or the attention was
        changed, naming it and the way out.
    """
    implementations = [(each, attention_of(each)) for each in configs]
    containers = _containers(layers, wrapped)

    def check() -> None:
        for each in wrapped:
            if not each.is_in_place():
                raise RuntimeError(_REPLACED.format(f"{each.name} of {type(each.parent).__name__}, or its forward,"))
        if layers not in children_of(parent).values():
            raise RuntimeError(_REPLACED.format(f"the list of layers of {type(parent).__name__}"))
        for container, children in containers:
            if [_uncompiled(child) for child in children_of(container).values()] != children:
                raise RuntimeError(_REPLACED.format(f"a module in {type(container).__name__}"))
        for config, implementation in implementations:
            if attention_of(config) != implementation:
                raise RuntimeError(
                    f"the attention was changed from {implementation!r} to {attention_of(config)!r} after "
                    "TokenTune was attached; remove() the handle, and attach again"
                )
        if not has_attention():
            raise RuntimeError(
                f"another function was registered for attn_implementation={implementations[0][1]!r} after "
                "TokenTune was attached, and would not be used, or run past it; remove() the handle, register the "
                "function, then attach again"
            )

    return check


_REPLACED = (
    "{} was replaced after TokenTune was attached, as PEFT does; remove() the handle, change the model, then attach "
    "again"
)


def _containers(layers: nn.ModuleList, wrapped: Sequence[TokenWise]) -> list[tuple[nn.Module, list[nn.Module | None]]]:
    """The list of layers, and every module in a layer that holds others and is not wrapped, with what they hold."""
    inside = {each.module for each in wrapped} - set(layers)
    found: list[tuple[nn.Module, list[nn.Module | None]]] = []
    waiting: list[nn.Module] = [layers]
    while waiting:
        module = waiting.pop()
        found.append((module, [_uncompiled(each) for each in children_of(module).values()]))
        waiting += [each for each in module.children() if each not in inside and any(True for _ in each.children())]
    return found


def _uncompiled(module: nn.Module | None) -> nn.Module | None:
    """The module that `torch.compile` has put another around, which runs it as it is."""
    return None if module is None else children_of(module).get("_orig_mod", module)
