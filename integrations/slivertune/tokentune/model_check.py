"""Check that a hooked model is still the one that was hooked: the same modules, and the same attention."""

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
    """Make a check of the model for each training forward, by a walk over the modules that hold others.

    Args:
        layers: List of the model's layers.
        parent: Module that holds the list.
        wrapped: Modules whose forward was replaced.
        configs: Configs of the model and its attention modules.
        has_attention: Whether the functions that intercept the attention are still in place.

    Returns:
        Function that compares the model with its present state. It raises a RuntimeError if a module was replaced, or
        the attention was changed, and names the change and the way out.
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
                    "TokenTune was attached. Call remove() on the handle, and attach again"
                )
        if not has_attention():
            raise RuntimeError(
                f"another function was registered for attn_implementation={implementations[0][1]!r} after "
                "TokenTune was attached, and would not be used, or would bypass it. Call remove() on the handle, "
                "register the function, then attach again"
            )

    return check


def check_run_in_backward(model: nn.Module, *, shrinks: bool, is_awaited: bool) -> None:
    """Refuse to run a whole model again inside of a backward, unless no selection was drawn for it before.

    Gradient caching may do so: it caches output gradients and runs the batch again in pieces (Gao et al., 2021).

    Args:
        model: The model.
        shrinks: Whether the model's output depends on the selection, so that the first forward returned something else.
        is_awaited: Whether the backward of a forward that drew a selection has not begun, or not ended.

    Raises:
        RuntimeError: If the forward drew its selection already, or dropout would give other values.
    """
    if is_awaited or shrinks:
        raise RuntimeError(
            "the whole model runs again in the backward, and would draw another selection. Checkpoint its layers, "
            "as transformers' own gradient checkpointing does, not the model"
        )
    if any(map(_drops, model.modules())):
        raise RuntimeError(
            "the model runs again in the backward (gradient caching), where dropout under TokenTune would drop other "
            "values than in the forward, since selected and other tokens run apart. Set the model's dropout to 0, or "
            "use the loss without caching (MultipleNegativesRankingLoss for the cached one)"
        )


def _drops(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    return isinstance(rate, float) and rate > 0.0


_REPLACED = (
    "{} was replaced after TokenTune was attached, as PEFT does. Call remove() on the handle, change the model, then "
    "attach again"
)


def _containers(layers: nn.ModuleList, wrapped: Sequence[TokenWise]) -> list[tuple[nn.Module, list[nn.Module | None]]]:
    """Return the list of layers, and all unwrapped modules in layers that have children, each with its children."""
    inside = {each.module for each in wrapped} - set(layers)
    found: list[tuple[nn.Module, list[nn.Module | None]]] = []
    waiting: list[nn.Module] = [layers]
    while waiting:
        module = waiting.pop()
        found.append((module, [_uncompiled(each) for each in children_of(module).values()]))
        waiting += [each for each in module.children() if each not in inside and any(True for _ in each.children())]
    return found


def _uncompiled(module: nn.Module | None) -> nn.Module | None:
    """Return the module inside of a `torch.compile` wrapper, or the module itself if it has none."""
    return None if module is None else children_of(module).get("_orig_mod", module)
