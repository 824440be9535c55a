"""Blocks of a model that transformers checkpoints, and stand-ins that run in front of their checkpointing.

transformers gives each block a function that checkpoints it, and a switch. Our stand-ins replace that function and call
it, one inside the other. The switch stays theirs (`activation_checkpointing_enable`). If it is off, no stand-in runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import override

from slivertune.core.module_hook import ModelHandle, ModuleHook, StandIn
from slivertune.core.outputs import tensors_of
from slivertune.core.refused_pairs import Feature, attach_feature
from slivertune.core.transformers_internals import checkpointing_of, set_checkpointing


class CheckpointedBlocksHandle(ModelHandle):
    """Stands in front of the checkpointing of a model's blocks. A subclass defines in `run` how a block runs.

    Args:
        model: A transformers model, or a PEFT model around one. Checkpointing may be switched on later.

    Raises:
        ValueError: If `needs_blocks`, and transformers checkpoints no block of the model.
    """

    is_innermost: ClassVar[bool] = False
    """Whether no other stand-in comes between this one and the function itself."""
    feature: Feature | None = None
    """Name of the feature in `refused_pairs`. None if it goes with every feature."""
    needs_blocks: ClassVar[bool] = True
    """Whether a model without such blocks is refused."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks = find_checkpointed_blocks(model) if self.needs_blocks else checkpointed_blocks(model)
        """Blocks that transformers checkpoints, from the bottom to the top."""
        self._place_of = {
            layer: index
            for index, block in enumerate(self.blocks)
            for layer in block.modules()
            if isinstance(layer, GradientCheckpointingLayer)
        }

    def put(self, model: nn.Module) -> None:
        """Put the stand-ins on the model. A subclass calls this when it is ready to `run`.

        Args:
            model: The model.

        Raises:
            RuntimeError: If the model has a feature that does not go with this one.
        """
        if self.feature is not None:
            self._undo.append(attach_feature(model, self.feature, self.blocks))
        self._put()
        self._undo.append(self._take_off)
        # Switching checkpointing on again sets a new function, so each forward puts missing stand-ins on.
        for module in _holders_of(model, self.blocks):
            self._undo.append(module.register_forward_pre_hook(ModuleHook(self._put)).remove)

    @property
    def is_switched_on(self) -> bool:
        """Whether any block is checkpointed now."""
        return any(block.gradient_checkpointing for block in self.blocks)

    def wants(self, function: Callable[..., Any]) -> bool:
        """Return whether to stand in front of a function that checkpoints a layer. True unless a subclass overrides it.

        Args:
            function: The layer's own function, or another stand-in.
        """
        return True

    def run(self, own: Callable[..., Any], layer: nn.Module, place: int, forward: Any, args: tuple[Any, ...]) -> Any:
        """Run a layer's forward.

        Args:
            own: Function that checkpoints the layer, called with `forward` and `args`.
            layer: A block, or a layer inside a block that is checkpointed by itself as well.
            place: Index of the block, from the bottom.
            forward: The layer's forward, with its keyword arguments bound (`functools.partial`).
            args: Positional arguments of the forward.
        """
        raise NotImplementedError

    def _put(self, *_: Any) -> None:
        for layer, place in self._place_of.items():
            own = checkpointing_of(layer)
            if own is None or not self.wants(own) or any(each.handle is self for each in _stand_ins(own)):
                continue
            last = next(reversed(list(_stand_ins(own))), None) if self.is_innermost else None
            if last is None:
                set_checkpointing(layer, BeforeCheckpointing(own, self, layer, place))
            else:
                last.function = BeforeCheckpointing(last.function, self, layer, place)

    def _take_off(self) -> None:
        for layer in self._place_of:
            own, outer = checkpointing_of(layer), None
            for each in _stand_ins(own):
                if each.handle is not self:
                    outer = each
                elif outer is None:
                    set_checkpointing(layer, each.function)
                else:
                    outer.function = each.function


class BeforeCheckpointing(StandIn):
    """Stands in for the function that checkpoints a layer.

    Args:
        function: The layer's own function, or another stand-in.
        handle: Handle that runs the layer.
        layer: The layer.
        place: Index of its block, from the bottom.
    """

    def __init__(
        self, function: Callable[..., Any], handle: CheckpointedBlocksHandle, layer: nn.Module, place: int
    ) -> None:
        super().__init__(function)
        self.keywords = getattr(function, "keywords", {})
        """Keyword arguments of `torch.utils.checkpoint.checkpoint`. Callers read here whether it is reentrant."""
        self.handle = handle
        """Handle that runs the layer."""
        self._layer, self._place = layer, place

    @property
    @override
    def feature(self) -> Feature | None:
        return self.handle.feature

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Run the forward by the handle."""
        return self.handle.run(self.function, self._layer, self._place, forward, args)


def checkpointed_blocks(model: nn.Module) -> tuple[GradientCheckpointingLayer, ...]:
    """Find the outermost modules that transformers checkpoints, from the bottom to the top.

    Args:
        model: Any module.
    """
    found: list[GradientCheckpointingLayer] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return tuple(found)


def find_checkpointed_blocks(model: nn.Module) -> tuple[GradientCheckpointingLayer, ...]:
    """Find the blocks of `checkpointed_blocks`, and refuse a model without any.

    Args:
        model: Any module.

    Raises:
        ValueError: If there is no such block.
    """
    found = checkpointed_blocks(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no block that transformers checkpoints by itself "
            "(GradientCheckpointingLayer), so no block can keep its activations or have its input offloaded. Leave "
            "keep_activations and offload_activations out"
        )
    return found


def records_graph(block: nn.Module, inputs: Any) -> bool:
    """Return whether a forward is recorded for a backward: gradients are on, and something in or below it trains.

    Args:
        block: The module.
        inputs: A nest that holds the input tensors.
    """
    if not torch.is_grad_enabled():
        return False
    return any(each.requires_grad for each in (*tensors_of(inputs), *block.parameters()))


def _stand_ins(function: Any) -> Iterator[BeforeCheckpointing]:
    """Yield the stand-ins in front of a function, from the outermost."""
    while isinstance(function, BeforeCheckpointing):
        inner = function.function
        yield function
        function = inner


def _holders_of(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that hold a block. A call of the model, or of a part of it, goes through one of these."""
    wanted = set(blocks)
    for module in model.modules():
        if module not in wanted and any(each in wanted for each in module.modules()):
            yield module
