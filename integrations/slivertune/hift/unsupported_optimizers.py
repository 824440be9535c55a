"""Base optimizers that HiFT can't rotate: one list, by class and by the name that transformers gives them.

Each uses weights, gradients or state outside of its `step`, when those of inactive groups are offloaded or don't exist.
None of the packages is imported: a class is recognised by its name and module, or by its attributes.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsupportedOptimizer:
    """A kind of optimizer."""

    reason: str
    """Reason why it can't be rotated, as the end of a sentence."""
    way_out: str
    """Alternative for the user."""
    holds: Callable[[type], bool]
    """Function that returns whether a class is of this kind."""
    names: Callable[[str], bool] = lambda _: False
    """Function that returns whether one of transformers' `optim` names is of this kind."""


def _demands_closure(kind: type) -> bool:
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is inspect.Parameter.empty


_PAGED = UnsupportedOptimizer(
    reason="it pages its state by itself, and HiFT already keeps it off the device",
    way_out="Use its variant without Paged (paged_)",
    holds=lambda kind: kind.__module__.startswith("bitsandbytes.") and kind.__name__.startswith("Paged"),
    names=lambda name: name.startswith("paged_"),
)
NEEDS_CLOSURE = UnsupportedOptimizer(
    reason="it evaluates the model again inside its step, on weights that HiFT writes back only afterwards",
    way_out="Use an optimizer whose step needs no closure",
    holds=_demands_closure,
)

UNSUPPORTED = (
    UnsupportedOptimizer(
        reason="it swaps the weights between training and evaluation, also of offloaded groups",
        way_out="Use torch.optim.AdamW (adamw_torch) with a schedule",
        holds=lambda kind: callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)),
        names=lambda name: name.startswith("schedule_free"),
    ),
    UnsupportedOptimizer(
        reason="it updates weights inside backward and keeps no gradient to step with",
        way_out="Use torch.optim.AdamW (adamw_torch) with gradients='stepped', which frees each gradient as early",
        holds=lambda kind: kind.__name__ in ("Lomo", "LOMO", "AdaLomo", "AdaLOMO"),
        names=lambda name: name in ("lomo", "adalomo"),
    ),
    UnsupportedOptimizer(
        reason="it steps each layer from hooks inside backward, past HiFT",
        way_out="Use its variant without _layerwise (HiFT keeps only one group's gradients anyway)",
        holds=lambda kind: kind.__name__ == "LayerWiseDummyOptimizer",
        names=lambda name: name.endswith("_layerwise"),
    ),
    _PAGED,
    NEEDS_CLOSURE,
    UnsupportedOptimizer(
        reason="it takes sparse gradients alone, and a model's blocks have dense ones",
        way_out="Set sparse=False on the embedding and use torch.optim.Adam",
        holds=lambda kind: issubclass(kind, torch.optim.SparseAdam),
    ),
    UnsupportedOptimizer(
        reason="it moves gradients and state to the host by hooks of its own",
        way_out="Use the class that it offloads, whose state HiFT keeps on the host",
        holds=lambda kind: kind.__module__.startswith("torchao.") and kind.__name__ == "CPUOffloadOptimizer",
    ),
)


def refuse_class(optimizer_class: type) -> None:
    """Refuse a class of optimizers that HiFT can't rotate.

    Args:
        optimizer_class: Any class with a `step`.

    Raises:
        ValueError: If it is one, with the reason and the way out.
    """
    for kind in UNSUPPORTED:
        if kind.holds(optimizer_class):
            raise refusal(optimizer_class.__name__, kind.reason, kind.way_out)


def refuse_name(optim: str) -> None:
    """Refuse an optimizer by the name of transformers' `TrainingArguments.optim`, before anything is built.

    Args:
        optim: Name of the optimizer.

    Raises:
        ValueError: If HiFT can't rotate it, with the reason and the way out.
    """
    for kind in UNSUPPORTED:
        if kind.names(optim):
            raise refusal(f"--optim {optim}", kind.reason, kind.way_out)


def refuse_instance(optimizer: Any) -> None:
    """Refuse an instance that pages, steps inside the backward, pairs parameters or wraps another optimizer.

    Args:
        optimizer: Instance of a class that `refuse_class` let pass.

    Raises:
        ValueError: If it does, with the reason and the way out.
    """
    name = type(optimizer).__name__
    if getattr(optimizer, "is_paged", False):
        raise refusal(f"{name} with is_paged=True", _PAGED.reason, "Leave is_paged out")
    if optimizer.defaults.get("gradient_release"):
        raise refusal(
            f"{name} with gradient_release=True",
            "it updates weights inside backward and keeps no gradient to step with",
            "Leave gradient_release out, and set gradients='stepped'",
        )
    by_place = ", ".join(sorted(_lists_beside_parameters(optimizer)))
    if by_place:
        raise refusal(
            name,
            f"its param groups list {by_place} per parameter, and HiFT steps some parameters at a time",
            "Use torch.optim.AdamW (adamw_torch)",
        )
    inner = next(_optimizers_in(vars(optimizer)), None)
    if inner is not None:
        raise refusal(
            name,
            f"it steps {type(inner).__name__} in its own way, which HiFT would skip",
            f"Give HiFT the {type(inner).__name__} itself",
        )


def refusal(name: str, reason: str, way_out: str) -> ValueError:
    """Build the error for an optimizer that can't be rotated.

    Args:
        name: Name of the optimizer.
        reason: Reason why it can't be, as the middle of a sentence.
        way_out: Alternative for the user.
    """
    return ValueError(f"{name} can't be HiFT's base optimizer: {reason}. {way_out}, or train densely")


def _lists_beside_parameters(optimizer: Any) -> set[str]:
    """Return keys of param groups with a list entry per parameter, but for torch's names, which no step reads."""
    known = {"params", "param_names", *optimizer.defaults}
    return {
        key
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, list) and key not in known and 0 < len(value) == len(group["params"])
    }


def _optimizers_in(value: Any, depth: int = 2) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers among the values of a dictionary or list, or one level below."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, torch.optim.Optimizer):
            yield part
        elif depth > 1 and isinstance(part, (dict, list, tuple)):
            yield from _optimizers_in(part, depth - 1)
