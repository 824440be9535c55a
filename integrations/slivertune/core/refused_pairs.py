"""Features that do not go together, or not with a setting: one list, which each of them checks when it is attached.

A feature of a model is recognized by its stand-ins on a module. It does not matter who put them there, nor through
which wrapper of the model. A module is compiled by its own `compile()`, by `torch.compile`, which puts another module
around it or another function in place of its forward, or by `compile_blocks`. A setting leaves no trace on a module, so
the code that reads it asks the list.

`torch.compile(model)` leaves the model as it is. Only a forward shows it, before torch traces any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.module_hook import ModuleHook, StandIn, put_stand_in
from slivertune.core.torch_internals import is_compiled, runs_in_compiled_module

Feature = Literal[
    "torch.compile",
    "tile_tokens",
    "offload_activations",
    "keep_activations='auto'",
    "quantised layers",
    "blocks on the host",
]
"""Features that stand on modules."""
Setting = Literal[
    "TokenTune",
    "gradients='stepped'",
    "gradients='host'",
    "load_in_4bit",
    "task='prompt_classification'",
    "compute_loss_func",
    "fp16",
    "label_smoothing_factor",
    "max_grad_norm",
    "router_aux_loss_coef",
    "use_liger_kernel",
]
"""Settings of a method, of a run and of the Trainer, and TokenTune before it is attached."""
Member = Feature | Setting | Layout

_REASON = "features of this model do not go with torch.compile (slivertune.core.refused_pairs)"
"""Reason that torch reports if a graph must be whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedPair:
    """Two features or settings that do not go together, in either order."""

    first: Member
    second: Member
    reason: str
    """Reason, as a sentence without its full stop."""
    way_out: str = "Leave out one of the two"
    """Way out, as a sentence without its full stop."""

    def __str__(self) -> str:
        return self.message(self.first, self.second)

    def message(self, first: str, second: str) -> str:
        """Return the message with names that the user wrote."""
        return f"{first} does not go with {second}: {self.reason}. {self.way_out}"


REFUSED_PAIRS = (
    RefusedPair(
        first="tile_tokens",
        second="torch.compile",
        reason="tile_tokens checkpoints each tile, which torch.compile can't do inside a block's graph",
    ),
    RefusedPair(
        first="offload_activations",
        second="torch.compile",
        reason="offload_activations copies on a second stream, which torch.compile can't do inside a graph",
    ),
    RefusedPair(
        first="quantised layers",
        second="torch.compile",
        reason="a call around each linear layer dequantises its weight, and a compiled model skips that call",
    ),
    RefusedPair(
        first="blocks on the host",
        second="torch.compile",
        reason="a block's weights are at another address in each forward, which a compiled block does not follow",
    ),
    RefusedPair(
        first="quantised layers",
        second="load_in_4bit",
        reason="both hold the frozen weights as codes",
    ),
    RefusedPair(
        first="blocks on the host",
        second="load_in_4bit",
        reason="only floating-point weights can be offloaded",
        way_out="Quantise the weights after they are loaded: waiting nf4 in place of load_in_4bit",
    ),
    RefusedPair(
        first="keep_activations='auto'",
        second="offload_activations",
        reason="'auto' measures a block's activations, not its input, which offload_activations moves to the host",
    ),
    RefusedPair(
        first="tile_tokens",
        second="use_liger_kernel",
        reason="Liger replaces the forwards of MLPs and norms, so tiles of tokens would have no effect",
    ),
    RefusedPair(
        first="tile_tokens",
        second="zero3",
        reason="ZeRO-3 would gather an MLP's weights again for every tile",
        way_out="Use another layout, or leave the tiles out",
    ),
    RefusedPair(
        first="load_in_4bit",
        second="zero3",
        reason="ZeRO-3 shards weights without the scales that belong to 4-bit codes",
        way_out="Use DDP, ZeRO-1 or ZeRO-2, or leave the 4-bit weights out",
    ),
    RefusedPair(
        first="torch.compile",
        second="fsdp2",
        reason="FSDP2 gathers a block's weights by hooks that torch can't trace",
        way_out="Leave it out, or use another layout",
    ),
    RefusedPair(
        first="torch.compile",
        second="zero3",
        reason="ZeRO-3 gathers weights by hooks within a block, which torch can't trace",
        way_out="Leave it out, or use another layout",
    ),
    RefusedPair(
        first="gradients='stepped'",
        second="max_grad_norm",
        reason="the norm of all gradients is known only when they are gone",
        way_out="Set max_grad_norm to 0 (the Trainer's default is 1.0), or use 'host' gradients, which can be clipped "
        "and take 2 bytes of host memory per bf16 weight of a group",
    ),
    RefusedPair(
        first="gradients='stepped'",
        second="fp16",
        reason="gradients are unscaled after the backward, on the device",
        way_out="Use bf16, or 'device' gradients",
    ),
    RefusedPair(
        first="gradients='host'",
        second="fp16",
        reason="gradients are unscaled after the backward, on the device",
        way_out="Use bf16, or 'device' gradients",
    ),
    RefusedPair(
        first="TokenTune",
        second="label_smoothing_factor",
        reason="the smoothed loss is computed outside the model, from the logits of all tokens",
        way_out="Set label_smoothing_factor to 0, or leave TokenTune out",
    ),
    RefusedPair(
        first="TokenTune",
        second="compute_loss_func",
        reason="it would be given logits of the selected tokens and labels of all",
        way_out="Leave it out, and the model scores the selected tokens itself",
    ),
    RefusedPair(
        first="TokenTune",
        second="router_aux_loss_coef",
        reason="the routers see selected and other tokens apart",
        way_out="Set router_aux_loss_coef=0.0 in the Trainer's arguments",
    ),
    RefusedPair(
        first="TokenTune",
        second="use_liger_kernel",
        reason="Liger replaces modules of the model in train(), after TokenTune was attached to them",
        way_out="Apply Liger's kernels to the model yourself before (liger_kernel.transformers has a function for each "
        "family), and leave use_liger_kernel out",
    ),
    RefusedPair(
        first="TokenTune",
        second="task='prompt_classification'",
        reason="its loss, outside the model, reads only the label word's position, which may not be selected",
        way_out="Leave it out, or use --task classification",
    ),
)


def attach_feature(model: nn.Module, feature: Feature, places: Iterable[nn.Module]) -> Callable[[], None]:
    """Refuse features of a model that do not go with `feature`, now and when they are added later.

    Args:
        model: The model. Call this before the feature's stand-ins are put on it.
        feature: The feature that is about to be attached.
        places: The modules on which its stand-ins are put.

    Returns:
        Function that ends the check.

    Raises:
        RuntimeError: If the model has something that does not go with the feature.
    """
    refuse_at(model, feature, places)
    if not any("torch.compile" in (pair.first, pair.second) for pair in _pairs_of(feature)):
        return lambda: None
    undo = [put_stand_in(each, "compile", _CheckedCompile(each)) for each in model.modules()]
    hooks = (_TracedForward(_refuse_traced), _UntracedForward(_refuse_compiled))
    undo += [model.register_forward_pre_hook(hook, prepend=True).remove for hook in hooks]

    def end() -> None:
        while undo:
            undo.pop()()

    return end


def refuse_beside(model: nn.Module, feature: Feature) -> None:
    """Refuse features of a model that do not go with `feature`.

    Args:
        model: The model, or a part of it.
        feature: The feature that is about to be attached.

    Raises:
        RuntimeError: If there is such a pair. The message names both.
    """
    _refuse({each for module in model.modules() for each in _features_on(module)}, feature)


def refuse_at(model: nn.Module, feature: Feature, places: Iterable[nn.Module]) -> None:
    """Refuse features that do not go with `feature` on `places`. Compiled modules elsewhere in the model are allowed.

    Args:
        model: The model.
        feature: The feature that is about to be attached.
        places: The modules.

    Raises:
        RuntimeError: If there is such a pair. The message names both.
    """
    at = set(map(id, places))
    for module in model.modules():
        if "torch.compile" in _features_on(module) and any(id(each) in at for each in module.modules()):
            _refuse({"torch.compile"}, feature)
    _refuse({each for module in model.modules() for each in _features_on(module)} - {"torch.compile"}, feature)


def refusal_of(asked: Mapping[Member, str | None]) -> str | None:
    """Return the message that refuses the first pair of settings that do not go together, or None.

    Args:
        asked: By feature or setting, the words that ask for it, as the user wrote them. None if no words do.
    """
    for pair in REFUSED_PAIRS:
        first, second = asked.get(pair.first), asked.get(pair.second)
        if first is not None and second is not None:
            return pair.message(first, second)
    return None


def refuse_together(asked: Mapping[Member, str | None]) -> None:
    """Refuse settings that do not go together, before there is a model.

    Args:
        asked: As for `refusal_of`.

    Raises:
        ValueError: If there is such a pair. The message names both.
    """
    refusal = refusal_of(asked)
    if refusal is not None:
        raise ValueError(refusal)


def _refuse(present: Collection[Feature], feature: Feature) -> None:
    for pair in _pairs_of(feature):
        if (pair.second if pair.first == feature else pair.first) in present:
            raise RuntimeError(str(pair))


def _pairs_of(feature: Feature) -> list[RefusedPair]:
    return [pair for pair in REFUSED_PAIRS if feature in (pair.first, pair.second)]


def _features_on(module: nn.Module) -> Iterator[Feature]:
    """Yield the features that stand on a module itself."""
    if is_compiled(module):
        yield "torch.compile"
    for value in vars(module).values():
        while isinstance(value, StandIn):
            if value.feature is not None:
                yield value.feature
            value = value.function


def _refuse_compiled(model: nn.Module, inputs: Any) -> None:
    """Refuse a forward inside of a compiled module, or of a model with a compiled part that has a feature."""
    if runs_in_compiled_module():
        refuse_beside(model, "torch.compile")
    for module in model.modules():
        if is_compiled(module):
            refuse_beside(module, "torch.compile")


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
def _refuse_traced(model: nn.Module, inputs: Any) -> None:
    refuse_beside(model, "torch.compile")


class _TracedForward(ModuleHook):
    """A hook that acts only while torch traces it, as in a compiled function that calls the model."""

    def __call__(self, *args: Any) -> Any:
        """Call the function with the arguments that torch passes to a hook."""
        return super().__call__(*args) if torch.compiler.is_compiling() else None


class _UntracedForward(ModuleHook):
    """A hook that torch does not trace, so that its error is not one of the compiler's."""

    @torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        """Call the function with the arguments that torch passes to a hook."""
        return super().__call__(*args)


class _CheckedCompile(StandIn):
    """A module's `compile`. It refuses if a feature of the module does not go with it.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.compile)
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_beside(self._module, "torch.compile")
        return self.function(*args, **kwargs)
