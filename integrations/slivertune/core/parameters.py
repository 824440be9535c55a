"""A model's parameters: their names, where they are held, and which optimizer trains each, one at a time.

Looking for them walks over modules and reads no tensor. An optimizer that freezes or wraps what it trains leaves no
mark that a second one could see, so it registers here. The registry holds neither parameters nor optimizers; an
optimizer that is gone holds nothing.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from slivertune.core.torch_internals import children_of

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What torch.compile and checkpointing call the module that they wrap."""

_owners = WeakTensorKeyDictionary()


def without_wrappers(name: str) -> str:
    """A parameter's name before torch.compile or checkpointing wrapped a module that holds it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def num_elements(parameter: torch.Tensor) -> int:
    """Elements of a whole parameter, also where ZeRO-3 has shared it out."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


NOTHING_TRAINS = (
    "no parameter of the model requires a gradient. Set requires_grad on what is to train, or load an adapter with "
    "is_trainable=True"
)
"""The error of every method where a model has nothing to train."""


def held_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Each module's own parameters, those of a module before those of its children.

    Args:
        model: The model.

    Yields:
        The module and the parameter, which is yielded for each module that holds it.
    """
    seen, stack = {id(model)}, [model]
    while stack:
        module = stack.pop()
        # Past ZeRO-3's own dictionary, which gathers what it is asked for in a forward.
        for parameter in dict.values(module._parameters):
            if parameter is not None:
                yield module, parameter
        for child in reversed(children_of(module).values()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def settle_requires_grad(required: Iterable[tuple[torch.Tensor, bool]]) -> None:
    """Restore what others have frozen or unfrozen: adapters that are switched on unfreeze all of theirs.

    Gradients that arrived where none belong are dropped, so that no norm counts them.

    Args:
        required: Parameters, each with whether it is to require a gradient.
    """
    for parameter, requires_grad in required:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
            if not requires_grad:
                parameter.grad = None


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The whole parameter's shape, which ZeRO-3 keeps apart while it has shared it out."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def check_form(method: str, name: str, parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a trained parameter that is of another dtype or shape than its optimizer was built over.

    Args:
        method: The optimizer, in the message.
        name: The parameter's name.
        parameter: As it is now.
        dtype: Its dtype when the optimizer was built.
        shape: The same of its shape.

    Raises:
        RuntimeError: Naming the parameter, the usual causes, and the way out.
    """
    rule = f"before {method} is built, whose state does not follow, or detach() this one and build a new {method}"
    if parameter.dtype != dtype:
        raise RuntimeError(
            f"{name} was {dtype} when {method} was built and is {parameter.dtype} now; cast the model (to(dtype), "
            f"half(), bfloat16() or float()) {rule}"
        )
    if whole_shape(parameter) != shape:
        raise RuntimeError(
            f"{name} was of shape {shape} when {method} was built and is of {whole_shape(parameter)} now "
            f"(resize_token_embeddings); do that {rule}"
        )


def owner_of(parameter: torch.Tensor) -> object | None:
    """The optimizer that trains a parameter, if one that still exists does."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


def check_free(named_parameters: Iterable[tuple[str, torch.Tensor]], newcomer: str) -> None:
    """Refuse to build an optimizer over parameters that another one trains.

    Args:
        named_parameters: All parameters of the model, with their names.
        newcomer: What is to be built.

    Raises:
        ValueError: Naming a parameter, who trains it, and the way out.
    """
    named = list(named_parameters)
    if any(owner_of(parameter) is not None for _, parameter in named):
        gc.collect()  # a scheduler and its optimizer, say, hold each other when both were dropped
    for name, parameter in named:
        owner = owner_of(parameter)
        if owner is not None:
            raise ValueError(
                f"{name} is trained by another {type(owner).__name__}, which was built over this model before, so "
                f"{newcomer} can't train it; call detach() of that one first, or drop it"
            )


def take(parameters: Iterable[torch.Tensor], owner: object) -> None:
    """Register that `owner` trains these parameters."""
    reference = weakref.ref(owner)
    for parameter in parameters:
        _owners[parameter] = reference


def release(parameters: Iterable[torch.Tensor], owner: object) -> None:
    """End what `take` registered; parameters of another owner stay that one's."""
    for parameter in parameters:
        if owner_of(parameter) is owner:
            del _owners[parameter]
