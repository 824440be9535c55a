"""Compile a model block by block: blocks of one kind share a few graphs, whichever of them trains.

`torch.compile` guards on which parameters and inputs require a gradient. A block is of one of four kinds: below the
trained layers, training with or without a gradient to pass on, or above. Each kind is compiled once and serves all
blocks. A whole model differs in every turn of HiFT, and torch gives up after eight.

The forward is compiled, not the call. Hooks of others on a block (TokenTune, FSDP2) stay outside of the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.checkpointed_blocks import records_graph
from slivertune.core.layers import find_blocks
from slivertune.core.module_hook import ModelHandle, StandIn
from slivertune.core.refused_pairs import Feature, refuse_beside
from slivertune.core.torch_internals import is_compiled, uncompiled_module

NUM_GRAPHS_LIMIT = 64
"""Limit of graphs for a block's forward, if torch lets a call set it. A class of blocks needs four graphs in training
and two in evaluation, each for fixed and for changing shapes."""

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class CompiledBlocks(ModelHandle):
    """Blocks that run compiled, until `remove()`. Also a context manager.

    Parameters, module names and classes stay as they are. Copies and pickles of the model are not compiled.
    """

    refusal_to_copy = (
        "a CompiledBlocks handle belongs to one model and is neither copied nor pickled. A copy of the model is not "
        "compiled. Call compile_blocks on it"
    )

    def __init__(self, blocks: Iterable[tuple[str, nn.Module]], options: dict[str, Any]) -> None:
        """Compile the blocks. Called by `compile_blocks`."""
        super().__init__()
        self.paths: list[str] = []
        """Module paths of the blocks."""
        self._options = options
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        for path, block in blocks:
            self.paths.append(path)
            stand_in = CompiledForward(path, block, self._compile)
            block.forward = stand_in
            self._undo.append(stand_in.remove)

    def _compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Compile the forward of a class. Blocks of a class share it."""
        if forward not in self._compiled:
            self._compiled[forward] = torch.compile(forward, **self._options)
        return self._compiled[forward]


class CompiledForward(StandIn):
    """Stands in for a block's forward.

    Args:
        path: Module path of the block, for errors.
        block: The block.
        compile_forward: Function that compiles the forward of a class.
    """

    def __init__(
        self, path: str, block: nn.Module, compile_forward: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        super().__init__(block.forward)
        self.path, self.block = path, block
        self._compile_forward = compile_forward

    @property
    @override
    def feature(self) -> Feature:
        return "torch.compile"

    def remove(self) -> None:
        """Let the block run uncompiled. A wrapper that something else has put around it since stays."""
        if vars(self.block).get("forward") is self:
            del self.block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, compiled unless it is given a cache."""
        cache = next((name for name in _CACHES if kwargs.get(name) is not None), None)
        # Read at each call, since FSDP2 gives blocks a class of its own.
        forward = type(self.block).forward
        if cache is not None:
            if self.block.training and torch.is_grad_enabled():
                raise ValueError(
                    f"{self.path} is given a cache ({cache}) in a training forward, so every block would be compiled "
                    "separately. Set model.config.use_cache = False, or pass use_cache=False"
                )
            return forward(self.block, *args, **kwargs)
        try:
            with _without_useless_checkpoint(self.block, (args, kwargs)):
                return self._compile_forward(forward)(self.block, *args, **kwargs)
        except Exception as error:
            if type(error).__module__.startswith("torch._dynamo"):
                error.add_note(
                    f"{self.path} ({type(self.block).__name__}) runs through slivertune.compile_blocks, which lets no "
                    "part of a block fall back to eager in silence. Pass fullgraph=False to allow graph breaks, or "
                    "don't compile this model (leave --torch_compile out)"
                )
            raise


def runs_compiled(module: nn.Module) -> bool:
    """Return whether a module is a block that `compile_blocks` has compiled."""
    return isinstance(vars(module).get("forward"), CompiledForward)


def has_compiled_blocks(model: nn.Module) -> bool:
    """Return whether `compile_blocks` has compiled blocks of a model."""
    return any(map(runs_compiled, model.modules()))


@contextmanager
def _without_useless_checkpoint(block: Any, inputs: Any) -> Any:
    """Switch checkpointing off if nothing will be recomputed.

    torch 2.13 can't compile a checkpoint in a graph that has no backward, as below the active group.
    """
    is_checkpointed = block.training and getattr(block, "gradient_checkpointing", False)
    if not is_checkpointed or records_graph(block, inputs):
        yield
        return
    block.gradient_checkpointing = False
    try:
        yield
    finally:
        block.gradient_checkpointing = True


def compile_blocks(model: nn.Module, *, fullgraph: bool = True, **options: Any) -> CompiledBlocks:
    """Compile each block of a model in place, so that all blocks share a few graphs.

    Under HiFT, a class of blocks has at most four graphs: below the active group, in it (at its lower end or not), and
    above it. Evaluation adds two. Sequences of changing length add one of each with dynamic shapes, unless
    `dynamic=True` makes them dynamic at once. Embedding, head and loss stay uncompiled, and so do forwards with a
    cache, as in generation. Call it before or after HiFT and TokenTune.

    Args:
        model: A model whose blocks `find_layers` finds. Parameters, module names and state dict stay as they are.
        fullgraph: Whether it is an error if torch can't trace a block whole, or reaches its limit of graphs. Otherwise
            torch breaks the graph or runs eagerly, and only logs it.
        **options: Further arguments of `torch.compile`: `backend`, `mode`, `dynamic`, `options`.

    Returns:
        Handle that lets the blocks run uncompiled again. As a context manager, it does so at its end.

    Raises:
        ValueError: If the model has no list of blocks.
        RuntimeError: If the model or a block is compiled already, a block's forward was replaced (offloading), or the
            model has a feature that does not go with torch.compile.

    Example:
        >>> slivertune.compile_blocks(model)
        >>> optimizer = slivertune.HiFT(model, torch.optim.AdamW, lr=2e-5)
    """
    if is_compiled(model):
        raise RuntimeError(
            f"{type(uncompiled_module(model)).__name__} is compiled as a whole already. Give compile_blocks the model "
            "as it was before torch.compile, and compile it once"
        )
    refuse_beside(model, "torch.compile")
    blocks = find_blocks(model)
    for path, block in blocks:
        own = vars(block).get("forward")
        if is_compiled(block):
            raise RuntimeError(f"{path} is compiled already. Compile the blocks once")
        if isinstance(own, CompiledForward):
            raise RuntimeError(f"{path} is compiled already. Call remove() on that handle first")
        if own is not None:
            raise RuntimeError(
                f"the forward of {path} was replaced by {own!r}, as offloading does (cpu_offload, a device_map with "
                "parts elsewhere), and can't be compiled. Compile the blocks before that, or leave compile_blocks out"
            )
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options.setdefault("recompile_limit", NUM_GRAPHS_LIMIT)
    return CompiledBlocks(blocks, {"fullgraph": fullgraph, **options})
