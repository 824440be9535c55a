"""PEFT's adapters beside parked weights: where they are, and which of them need the weights themselves."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slivertune.core.module_hook import StandIn, put_stand_in

_READ_NO_WEIGHT = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` whose initialiser reads no weight of the base."""
_TYPES = frozenset(
    (
        *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "RANDLORA", "VBLORA"),
        *("C3A", "ROAD", "WAVEFT", "LN_TUNING", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT"),
    )
)
"""Types of PEFT's adapters that call the layers that they wrap, and read no weight of them."""


def adapter_modules(model: nn.Module) -> set[int]:
    """Return the `id`s of modules that PEFT has put beside the layers that it wraps, its `base_layer`s."""
    return {
        id(module)
        for wrapper in _wrappers(model)
        for name, child in wrapper.named_children()
        if name != "base_layer"
        for module in child.modules()
    }


def move_adapters(model: nn.Module, device: torch.device) -> None:
    """Move PEFT's modules to a device. Their parameters stay the same objects, which an optimizer may have."""
    found = adapter_modules(model)
    for module in model.modules():
        if id(module) in found:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)


def adapters_of(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the configurations of the adapters that PEFT has attached to models, by name.

    Args:
        modules: Modules that may be models with adapters.
    """
    found: dict[str, Any] = {}
    for module in modules:
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping):
            found |= configs
    return found


def refuse_adapters(adapters: Mapping[str, Any], attached_before: Collection[str] | None = None) -> None:
    """Refuse adapters that read the weights of the layers that they wrap.

    Args:
        adapters: Configurations by name.
        attached_before: Names of adapters that were attached before the weights were parked, whose initialiser may
            have read them. None if the weights are not parked yet.

    Raises:
        ValueError: If there is one, with its name and the way out.
    """
    for name, config in adapters.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _TYPES:
            raise ValueError(
                f"the adapter {name!r} is of the type {kind}, which may read the weights of the layers that it wraps, "
                f"while they are parked. Use one of {', '.join(sorted(_TYPES))}, or leave the layers as they are"
            )
        if getattr(config, "use_dora", False):
            raise ValueError(
                f"the adapter {name!r} uses DoRA, which reads the norms of the base's weights in each forward, and "
                "parked weights are elsewhere then. Set use_dora=False, or leave the layers as they are"
            )
        init = getattr(config, "init_lora_weights", True)
        if attached_before is not None and name not in attached_before and init not in _READ_NO_WEIGHT:
            raise ValueError(
                f"the adapter {name!r} was attached after the layers were parked, and init_lora_weights={init!r} reads "
                "the base's weights. Attach it first, and park the layers then"
            )


def refuse_merges(model: nn.Module, parked: Collection[int]) -> Callable[[], None]:
    """Refuse to merge adapters into parked weights from now on.

    Args:
        model: Model with adapters.
        parked: `id`s of modules whose weights are parked.

    Returns:
        Function that ends this.

    Raises:
        ValueError: If one is merged already, and so could not be disabled any more.
    """
    undo = []
    for wrapper in _wrappers(model):
        if id(wrapper.base_layer) not in parked or isinstance(vars(wrapper).get("merge"), _RefusedMerge):
            continue
        if getattr(wrapper, "merged", False):
            raise ValueError(
                f"{type(wrapper).__name__} has merged its adapter into a weight that is to be parked. Call "
                "unmerge_adapter() first, or merge_and_unload()"
            )
        if hasattr(wrapper, "merge"):
            undo.append(put_stand_in(wrapper, "merge", _RefusedMerge(wrapper.merge)))

    def end() -> None:
        while undo:
            undo.pop()()

    return end


def _wrappers(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that PEFT has put around layers of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            yield module


class _RefusedMerge(StandIn):
    """`merge` of an adapter's layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "an adapter can't be merged into parked weights. Call remove() on what park_layers returned first, or save "
            "the adapter and merge its folder (slivertune merge)"
        )
