"""MLPs and norms in tiles of tokens: what they compute inside exists for one tile at a time, also in the backward.

Each tile is checkpointed by `torch.utils.checkpoint`, so that the graph keeps the module's input alone, and a weight's
gradient is summed over the tiles before it is accumulated: whoever hooks gradients sees one. DeepSpeed's `TiledMLP` has
a backward of its own instead, which accumulates every tile's gradient into `.grad`: its own engine is told which is
the last, while hooks of DDP, FSDP2 and HiFT would take each for a whole gradient; and it draws other dropout in the
backward than in the forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from typing_extensions import override

from slivertune.core.checkpointed_blocks import records_graph
from slivertune.core.layers import find_blocks
from slivertune.core.module_hook import ModelHandle, StandIn, put_stand_in
from slivertune.core.refused_pairs import Feature, attach_feature
from slivertune.core.setting_checks import check_integer
from slivertune.core.token_wise import BesideAttention, children_beside_attention, is_norm, norms_outside

_OF_EXPERTS = ("Experts", "MoE", "Moe", "MoEBlock", "MoeBlock")
"""How the class names of mixtures of experts end in transformers."""


def tile_tokens(
    model: nn.Module, tile_size: int, *, recompute_context: Callable[[], Any] = noop_context_fn
) -> TokenTilesHandle:
    """Let a model's MLPs and norms go through long inputs in tiles of tokens, which the backward computes again.

    Losses and gradients are those of whole inputs, but for the order in which a weight's gradient is summed; with
    dropout in an MLP, other elements are dropped. Beside its input, output and their gradients an MLP takes the memory
    of one tile's intermediate results. Each tile is computed once more in the backward, also where its block is
    checkpointed. Inputs of no more than a tile run whole.

    Args:
        model: A transformers model, or a PEFT model around one. Attach it before TokenTune.
        tile_size: Tokens of a tile, of all sequences of the batch together. A few thousand keep a GPU busy.
        recompute_context: As `context_fn` of `torch.utils.checkpoint.checkpoint`.

    Returns:
        Takes it off again; also a context manager.

    Raises:
        ValueError: If the size is not positive, or if no block has an MLP that treats each token for itself.
        RuntimeError: If the forward of such a module was replaced by something else.

    Example:
        >>> with slivertune.tile_tokens(model, 8192):
        ...     train(model)
    """
    return TokenTilesHandle(model, tile_size, recompute_context)


class TokenTilesHandle(ModelHandle):
    """A model whose MLPs and norms run in tiles; also a context manager, which ends that at its end.

    Args:
        model: As `tile_tokens` takes it.
        tile_size: Tokens of a tile.
        recompute_context: As `tile_tokens` takes it.
    """

    refusal_to_copy = (
        "a TokenTilesHandle belongs to one model and is neither copied nor pickled; a copy of the model runs its MLPs "
        "whole: call tile_tokens on it"
    )

    def __init__(
        self, model: nn.Module, tile_size: int, recompute_context: Callable[[], Any] = noop_context_fn
    ) -> None:
        super().__init__()
        check_tile_size(tile_size)
        paths = {module: path for path, module in model.named_modules()}
        blocks = [block for _, block in find_blocks(model)]
        beside = [child for block in blocks for child in children_beside_attention(block) if _can_be_tiled(child)]
        found = dict.fromkeys(child.module for child in beside if not _is_mixture(child.module))
        mixtures = [paths[child.module] for child in beside if _is_mixture(child.module)]
        found |= dict.fromkeys(parent.get_submodule(name) for parent, name in norms_outside(model, blocks))
        self.paths = tuple(paths[module] for module in found)
        """Module paths of what runs in tiles."""
        if all(map(is_norm, found)):
            raise ValueError(
                f"no block of {type(model).__name__} has an MLP that can run in tiles of tokens: a module that holds "
                "the linear layers of its feed-forward part and is no mixture of experts; leave tile_tokens out"
            )
        if mixtures:
            warnings.warn(
                f"tile_tokens leaves mixtures of experts whole: {mixtures[0]}, of {len(mixtures)} such modules",
                stacklevel=3,
            )
        for module in found:
            if _has_other_forward(module):
                raise RuntimeError(
                    f"the forward of {paths[module]} was replaced by {vars(module)['forward']!r}; call tile_tokens "
                    "before TokenTune and whatever else replaces it, and once for a model"
                )
        self._undo.append(attach_feature(model, "tile_tokens", found))
        for module in found:
            tiles = _Tiles(module, paths[module], tile_size, recompute_context)
            self._undo.append(put_stand_in(module, "forward", tiles))
            self._undo.append(tiles.end)


def check_tile_size(tile_size: Any) -> None:
    """Refuse a tile that can't be.

    Args:
        tile_size: Its tokens.

    Raises:
        ValueError: Naming the number and the rule.
    """
    check_integer("token_tile_size", tile_size, 1)


def tiles_under_zero3() -> str:
    """Why there are no tiles under ZeRO-3, in the words that planning and training share."""
    return (
        "--token_tile_size does not go with ZeRO-3, which would gather an MLP's weights anew for every tile; take "
        "another layout, or leave --token_tile_size out"
    )


def runs_in_tiles(module: nn.Module) -> bool:
    """Whether `tile_tokens` lets a module run in tiles."""
    own = vars(module).get("forward")
    return isinstance(own, _Tiles) and own.is_on


class _Tiles(StandIn):
    """Stands in for the forward of a module that treats each token for itself.

    Args:
        module: The module.
        path: Its path, for errors.
        tile_size: Tokens of a tile.
        recompute_context: For `checkpoint`.
    """

    def __init__(self, module: nn.Module, path: str, tile_size: int, recompute_context: Callable[[], Any]) -> None:
        super().__init__(module.forward)
        self._module, self._path, self._tile_size, self._context = module, path, tile_size, recompute_context
        self.is_on = True
        """Whether it was not taken off, though something else may hold it still."""

    @property
    @override
    def feature(self) -> Feature | None:
        return "tile_tokens" if self.is_on else None

    def end(self) -> None:
        """Pass every call on from now on, also where something that came later holds this."""
        self.is_on = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, in tiles where its input is longer than one."""
        given = (*args, *kwargs.values())
        shape = next((each.shape for each in given if isinstance(each, torch.Tensor)), torch.Size())
        dim, length = self._cut_of(shape)
        if not self.is_on or length >= shape[dim : dim + 1].numel():
            return self.function(*args, **kwargs)
        self._check(args, kwargs, shape, dim)
        records = records_graph(self._module, args)
        pieces = zip(*(each.split(length, dim) for each in args), strict=True)
        outputs = [self._run(piece, records=records) for piece in pieces]
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise RuntimeError(f"{self._path} returns {type(outputs[0]).__name__}, not a tensor; remove() tile_tokens")
        return torch.cat(outputs, dim)

    def _run(self, tile: tuple[torch.Tensor, ...], *, records: bool) -> Any:
        if not records:
            return self._call(*tile)
        return checkpoint(self._call, *tile, use_reentrant=False, context_fn=self._context)

    def _call(self, *tile: torch.Tensor) -> Any:
        # A tile of several sequences has gaps, and modules may view the contiguous tensors that they are given. Copied
        # inside of the checkpoint, which keeps no copy.
        return self.function(*(each.contiguous() for each in tile))

    def _cut_of(self, shape: torch.Size) -> tuple[int, int]:
        """Along which dimension to cut, the longest but the last, and how long a tile is there."""
        if len(shape) < 2:
            return 0, 1
        dim = max(range(len(shape) - 1), key=lambda each: shape[each])
        # Tokens that lie beside each other in the dimension that is not cut: sequences, or the tokens of one.
        num_beside = 1 if len(shape) == 2 else shape[0 if dim > 0 else 1]
        return dim, max(1, self._tile_size // max(1, num_beside))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size, dim: int) -> None:
        others = [each for each in args if not isinstance(each, torch.Tensor) or each.shape[:-1] != shape[:-1]]
        if kwargs or others:
            raise RuntimeError(
                f"{self._path} ({type(self._module).__name__}) is given more than tensors of one row for each token, "
                "and can't be cut into tiles of tokens; remove() tile_tokens"
            )
        if any(hasattr(each, "ds_id") for each in self._module.parameters()):
            raise RuntimeError(
                "under ZeRO-3 every tile would gather the weights anew; take another layout, or leave tile_tokens out"
            )


def _can_be_tiled(child: BesideAttention) -> bool:
    """Whether it is a norm, or an MLP: a module of modules with weights, which no attention holds."""
    if child.mixes_tokens:
        return False
    inner = child.module.children()
    return is_norm(child.module) or (not child.in_attention and any(map(_has_weights, inner)))


def _has_other_forward(module: nn.Module) -> bool:
    """Whether a module has another forward than its class's, which a copy has as its own."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_mixture(module: nn.Module) -> bool:
    """Whether tokens go to experts, of which losses and statistics are made that are of all tokens."""
    names = [type(each).__name__ for each in module.modules()]
    return any(name.endswith(_OF_EXPERTS) or "Router" in name for name in names)
