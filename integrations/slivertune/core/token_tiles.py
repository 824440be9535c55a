"""Run MLPs and norms in tiles of tokens: intermediate results exist for one tile at a time, in the backward, too.

`torch.utils.checkpoint` checkpoints each tile, so the graph keeps the module's input alone. A weight's gradient is
summed over the tiles before it is accumulated, so hooks on gradients see one. DeepSpeed's `TiledMLP` has its own
backward instead, which accumulates every tile's gradient into `.grad`. DeepSpeed's engine is told which tile is the
last, but hooks of DDP, FSDP2 and HiFT would take each for a whole gradient. `TiledMLP` also draws other dropout in the
backward than in the forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from typing_extensions import override

from slivertune.core.checkpointed_blocks import records_graph
from slivertune.core.layers import find_blocks
from slivertune.core.module_hook import ModelHandle, StandIn, has_other_forward, put_stand_in
from slivertune.core.refused_pairs import Feature, attach_feature, refusal_of
from slivertune.core.repeated_work import over_tiles
from slivertune.core.setting_checks import check_integer
from slivertune.core.token_wise import BesideAttention, children_beside_attention, is_norm, norms_outside

_OF_EXPERTS = ("Experts", "MoE", "Moe", "MoEBlock", "MoeBlock")
"""Endings of the class names of mixtures of experts in transformers."""


def tile_tokens(
    model: nn.Module, tile_size: int, *, recompute_context: Callable[[], Any] = noop_context_fn
) -> TokenTilesHandle:
    """Run a model's MLPs and norms on long inputs in tiles of tokens, which the backward computes again.

    Losses and gradients are those of whole inputs, except for the order in which a weight's gradient is summed. With
    dropout in an MLP, other elements are dropped. Besides its input, output and their gradients, an MLP takes the
    memory of one tile's intermediate results. Each tile is computed once more in the backward, even if its block is
    checkpointed. Inputs of at most one tile run whole.

    Args:
        model: A transformers model, or a PEFT model around one. Attach it before TokenTune.
        tile_size: Tokens per tile, over all sequences of the batch together. A few thousand keep a GPU busy.
        recompute_context: Value of `context_fn` of `torch.utils.checkpoint.checkpoint`.

    Returns:
        Handle that restores the model. Also a context manager.

    Raises:
        ValueError: If the size is not positive, or if no block has an MLP that treats each token by itself.
        RuntimeError: If the forward of such a module was replaced by something else, or is compiled.

    Example:
        >>> with slivertune.tile_tokens(model, 8192):
        ...     train(model)
    """
    return TokenTilesHandle(model, tile_size, recompute_context)


class TokenTilesHandle(ModelHandle):
    """Handle of a model whose MLPs and norms run in tiles. Also a context manager.

    Args:
        model: The model, as for `tile_tokens`.
        tile_size: Tokens per tile.
        recompute_context: Value of `context_fn`, as for `tile_tokens`.
    """

    refusal_to_copy = (
        "a TokenTilesHandle belongs to one model and is neither copied nor pickled. A copy of the model runs its MLPs "
        "whole. Call tile_tokens on it"
    )

    def __init__(
        self, model: nn.Module, tile_size: int, recompute_context: Callable[[], Any] = noop_context_fn
    ) -> None:
        super().__init__()
        check_integer("token_tile_size", tile_size, 1)
        paths = {module: path for path, module in model.named_modules()}
        blocks = [block for _, block in find_blocks(model)]
        beside = [child for block in blocks for child in children_beside_attention(block) if _can_be_tiled(child)]
        found = dict.fromkeys(child.module for child in beside if not _is_mixture(child.module))
        mixtures = [paths[child.module] for child in beside if _is_mixture(child.module)]
        found |= dict.fromkeys(parent.get_submodule(name) for parent, name in norms_outside(model, blocks))
        self.paths = tuple(paths[module] for module in found)
        """Module paths of the modules that run in tiles."""
        if all(map(is_norm, found)):
            raise ValueError(
                f"no block of {type(model).__name__} has an MLP that can run in tiles of tokens: a module that holds "
                "the linear layers of its feed-forward part and is no mixture of experts. Leave tile_tokens out"
            )
        if mixtures:
            warnings.warn(
                f"tile_tokens does not tile mixtures of experts: {mixtures[0]}, of {len(mixtures)} such modules",
                stacklevel=3,
            )
        for module in found:
            if has_other_forward(module):
                raise RuntimeError(
                    f"the forward of {paths[module]} was replaced by {vars(module)['forward']!r}. Call tile_tokens "
                    "before anything that replaces it (such as TokenTune), and once per model"
                )
        self._undo.append(attach_feature(model, "tile_tokens", found))
        for module in found:
            tiles = _Tiles(module, paths[module], tile_size, recompute_context)
            self._undo.append(put_stand_in(module, "forward", tiles))
            self._undo.append(tiles.end)


def runs_in_tiles(module: nn.Module) -> bool:
    """Return whether `tile_tokens` lets a module run in tiles."""
    own = vars(module).get("forward")
    return isinstance(own, _Tiles) and own.is_on


class _Tiles(StandIn):
    """Stands in for the forward of a module that treats each token by itself.

    Args:
        module: The module.
        path: Its path, for errors.
        tile_size: Tokens per tile.
        recompute_context: Value of `context_fn` of `checkpoint`.
    """

    def __init__(self, module: nn.Module, path: str, tile_size: int, recompute_context: Callable[[], Any]) -> None:
        super().__init__(module.forward)
        self._module, self._path, self._tile_size, self._context = module, path, tile_size, recompute_context
        self.is_on = True
        """Whether it is active. Something else may still hold it after its removal."""

    @property
    @override
    def feature(self) -> Feature | None:
        return "tile_tokens" if self.is_on else None

    def end(self) -> None:
        """Pass every call on from now on, even if a later wrapper holds this."""
        self.is_on = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, in tiles if its input is longer than one."""
        given = (*args, *kwargs.values())
        shape = next((each.shape for each in given if isinstance(each, torch.Tensor)), torch.Size())
        dim, length = self._cut_of(shape)
        if not self.is_on or length >= shape[dim : dim + 1].numel():
            return self.function(*args, **kwargs)
        self._check(args, kwargs, shape, dim)
        records = records_graph(self._module, args)
        outputs = over_tiles(partial(self._run, records=records), args, length, dim)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise RuntimeError(f"{self._path} returns {type(outputs[0]).__name__}, not a tensor. Leave tile_tokens out")
        return torch.cat(outputs, dim)

    def _run(self, *tile: torch.Tensor, records: bool) -> Any:
        if not records:
            return self._call(*tile)
        return checkpoint(self._call, *tile, use_reentrant=False, context_fn=self._context)

    def _call(self, *tile: torch.Tensor) -> Any:
        # A tile of several sequences has gaps, and modules may rely on contiguous inputs (`view`). The copy is made
        # inside of the checkpoint, which does not keep it.
        return self.function(*(each.contiguous() for each in tile))

    def _cut_of(self, shape: torch.Size) -> tuple[int, int]:
        """Choose the dimension to cut (the longest, except for the last one) and the length of a tile there."""
        if len(shape) < 2:
            return 0, 1
        dim = max(range(len(shape) - 1), key=lambda each: shape[each])
        # Number of tokens along the dimension that is not cut: sequences, or the tokens of one.
        num_beside = 1 if len(shape) == 2 else shape[0 if dim > 0 else 1]
        return dim, max(1, self._tile_size // max(1, num_beside))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size, dim: int) -> None:
        others = [each for each in args if not isinstance(each, torch.Tensor) or each.shape[:-1] != shape[:-1]]
        if kwargs or others:
            raise RuntimeError(
                f"{self._path} ({type(self._module).__name__}) gets arguments other than tensors with one row per "
                "token, and can't run in tiles of tokens. Leave tile_tokens out"
            )
        if any(hasattr(each, "ds_id") for each in self._module.parameters()):
            raise RuntimeError(refusal_of({"tile_tokens": "tile_tokens", "zero3": "ZeRO-3"}))


def _can_be_tiled(child: BesideAttention) -> bool:
    """Return whether a child is a norm, or an MLP: its own children have weights, and no attention holds it."""
    if child.mixes_tokens:
        return False
    inner = child.module.children()
    return is_norm(child.module) or (not child.in_attention and any(map(_has_weights, inner)))


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_mixture(module: nn.Module) -> bool:
    """Return whether a module routes tokens to experts, whose losses and statistics need all tokens."""
    names = [type(each).__name__ for each in module.modules()]
    return any(name.endswith(_OF_EXPERTS) or "Router" in name for name in names)
