"""Parameters of a model: their names, their modules, and the one optimizer at a time that trains each.

The look-ups walk over modules and read no tensor. An optimizer that freezes or wraps its parameters leaves no mark that
a second one could see, so it registers here. The registry holds neither parameters nor optimizers. An optimizer that is
gone owns nothing.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from slivertune.core.torch_internals import children_of

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Names that torch.compile and checkpointing give the module that they wrap."""

_owners = WeakTensorKeyDictionary()


def without_wrappers(name: str) -> str:
    """Return a parameter's name before torch.compile or checkpointing wrapped a module that holds it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def num_elements(parameter: torch.Tensor) -> int:
    """Count the elements of a whole parameter, even if ZeRO-3 has sharded it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


NOTHING_TRAINS = (
    "no parameter of the model requires a gradient. Set requires_grad on the parameters to train, or load an adapter "
    "with is_trainable=True"
)
"""Error of every method if a model has nothing to train."""


def held_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield each module's own parameters, those of a module before those of its children.

    Args:
        model: The model.

    Yields:
        The module and the parameter. A shared parameter is yielded once per module that holds it.
    """
    seen, stack = {id(model)}, [model]
    while stack:
        module = stack.pop()
        # Bypass ZeRO-3's own dictionary, which gathers each requested parameter in a forward.
        for parameter in dict.values(module._parameters):
            if parameter is not None:
                yield module, parameter
        for child in reversed(children_of(module).values()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def settle_requires_grad(required: Iterable[tuple[torch.Tensor, bool]]) -> None:
    """Restore `requires_grad` after others have changed it: enabling an adapter unfreezes all its parameters.

    A parameter that is frozen again loses its gradient, so that no norm counts it.

    Args:
        required: Parameters, each with whether it is to require a gradient.
    """
    for parameter, requires_grad in required:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
            if not requires_grad:
                parameter.grad = None


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the whole parameter's shape. ZeRO-3 stores it separately while the parameter is sharded."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def check_form(method: str, name: str, parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a trained parameter whose dtype or shape has changed since its optimizer was built.

    Args:
        method: Name of the optimizer in the message.
        name: Name of the parameter.
        parameter: The parameter as it is now.
        dtype: Its dtype when the optimizer was built.
        shape: Its whole shape when the optimizer was built.

    Raises:
        RuntimeError: If one has changed. The message names the parameter, the usual causes, and the way out.
    """
    rule = f"before {method} is built, since its state does not follow, or call detach() and build a new {method}"
    if parameter.dtype != dtype:
        raise RuntimeError(
            f"{name} was {dtype} when {method} was built and is {parameter.dtype} now. Cast the model (to(dtype), "
            f"half(), bfloat16() or float()) {rule}"
        )
    if whole_shape(parameter) != shape:
        raise RuntimeError(
            f"{name} had shape {shape} when {method} was built and has {whole_shape(parameter)} now "
            f"(resize_token_embeddings). Resize {rule}"
        )


def owner_of(parameter: torch.Tensor) -> object | None:
    """Return the optimizer that trains a parameter, if one that still exists does."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


def check_free(named_parameters: Iterable[tuple[str, torch.Tensor]], newcomer: str) -> None:
    """Refuse to build an optimizer over parameters that another one trains.

    Args:
        named_parameters: All parameters of the model, with their names.
        newcomer: Name of the optimizer that is to be built.

    Raises:
        ValueError: If another one trains a parameter. The message names both, and the way out.
    """
    named = list(named_parameters)
    if any(owner_of(parameter) is not None for _, parameter in named):
        gc.collect()  # a dropped scheduler and its dropped optimizer, say, hold each other
    for name, parameter in named:
        owner = owner_of(parameter)
        if owner is not None:
            raise ValueError(
                f"{name} is trained by another {type(owner).__name__} that was built over this model, so {newcomer} "
                "can't train it. Call detach() on that one first, or delete it"
            )


def take(parameters: Iterable[torch.Tensor], owner: object) -> None:
    """Register `owner` as the optimizer that trains these parameters."""
    reference = weakref.ref(owner)
    for parameter in parameters:
        _owners[parameter] = reference


def release(parameters: Iterable[torch.Tensor], owner: object) -> None:
    """End the registration by `take`. Parameters of another owner keep that owner."""
    for parameter in parameters:
        if owner_of(parameter) is owner:
            del _owners[parameter]
