"""Find the modules that treat each token by itself: all but attention, convolutions and other mixers."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import nn

from slivertune.core.torch_internals import BatchNorm, ConstantPad, Convolution

_ARGUMENTS_OF_MIXERS = frozenset(("attention_mask", "position_ids", "position_embeddings", "past_key_values"))
"""Arguments of modules that treat tokens by their positions."""
_MIXERS = (Convolution, BatchNorm, nn.GroupNorm, nn.RNNBase, ConstantPad)
"""Classes of modules whose result for a token depends on other tokens."""
_OF_PEFT = frozenset(("LilyLayer", "MontecloraSampler", "MultiplicativeDropoutLayer", "PolyLayer"))
"""Classes of PEFT that average over tokens, or draw once for all of them."""
_DROPOUT_OF_RANKS = ("rank_dropout", "module_dropout")
"""Attributes of PEFT's LoHa and LoKr layers, rates by adapter: they drop a rank, or the adapter, for all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideAttention:
    """One of the largest modules of a block that hold no attention."""

    parent: nn.Module
    """Module that holds it."""
    name: str
    """Name of the module in its parent."""
    in_attention: bool
    """Whether it is a part of an attention module."""
    mixer: str | None
    """Class of a module in it that mixes tokens, such as a convolution, or that draws once for all tokens. None if
    there is none."""
    places: tuple[str, ...]
    """Arguments that give it the positions of tokens. Empty if it treats each token by itself."""

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.parent.get_submodule(self.name)

    @property
    def mixes_tokens(self) -> bool:
        """Whether its result for a token depends on other tokens, or on the token's position."""
        return self.mixer is not None or bool(self.places)


def children_beside_attention(module: nn.Module, *, in_attention: bool = False) -> Iterator[BesideAttention]:
    """Yield a block's largest modules without attention, except embeddings and modules that only rank or drop tokens.

    Args:
        module: A block.
        in_attention: Whether it is inside an attention module.
    """
    for name, child in module.named_children():
        if "Rotary" in type(child).__name__ or isinstance(child, nn.Embedding):
            continue
        if isinstance(child, nn.ModuleList) or holds_attention(child):
            yield from children_beside_attention(child, in_attention=in_attention or is_attention(child))
            continue
        if "Indexer" in type(child).__name__:
            continue  # it selects tokens to attend to among all tokens, and its result passes no gradient
        if _drops_sequences(child):
            continue  # it multiplies all tokens of a sequence by one number, and has to see them in one call
        mixers = (_mixer(each) for each in child.modules())
        asked = inspect.signature(type(child).forward).parameters
        yield BesideAttention(
            parent=module,
            name=name,
            in_attention=in_attention,
            mixer=next((each for each in mixers if each is not None), None),
            places=tuple(sorted(_ARGUMENTS_OF_MIXERS.intersection(asked))),
        )


def _mixer(module: nn.Module) -> str | None:
    """Return what in a module, its children aside, mixes tokens or draws once for all of them. None if nothing does."""
    if isinstance(module, _MIXERS) or _drops_sequences(module):
        return type(module).__name__
    # PEFT may not be installed, so its layers are known by their names.
    by_name = (each.__name__ for each in type(module).__mro__ if each.__name__ in _OF_PEFT)
    variants = (type(each).__name__ for each in getattr(module, "lora_variant", {}).values())
    activated = (each for each in variants if each.startswith("ALora"))  # from some token on, counted from the end
    dropping = (name for name in _DROPOUT_OF_RANKS if _has_rate(getattr(module, name, None)))
    return next(chain(by_name, activated, dropping), None)


def _has_rate(rates: object) -> bool:
    return isinstance(rates, Mapping) and any(rates.values())


def _drops_sequences(module: nn.Module) -> bool:
    """Return whether a module is stochastic depth: it drops all tokens of a sequence, or none."""
    return type(module).__name__.endswith(("DropPath", "StochasticDepth"))


def holds_attention(module: nn.Module) -> bool:
    """Return whether a module is, or holds, an attention module."""
    return any(map(is_attention, module.modules()))


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention module, by its class."""
    name = type(module).__name__
    return "Attention" in name or name.endswith("MLA")  # multi-head latent attention, as LongCat calls it


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its class."""
    return "norm" in type(module).__name__.lower()


def norms_outside(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the norms of each token by itself before and after the blocks: the module that holds one, its name there.

    Args:
        model: The model.
        blocks: Its blocks.
    """
    inside = {each for block in blocks for each in block.modules()}
    for parent in model.modules():
        if parent in inside:
            continue
        for name, child in parent.named_children():
            if is_norm(child) and not isinstance(child, _MIXERS) and not list(child.children()):
                yield parent, name
