"""Checkpointing by layer: under transformers' own checkpointing, the uppermost blocks keep their activations.

A block that keeps them is not computed again in the backward. The uppermost ones are chosen, since a backward begins
there: what they keep is needed first and is gone when the blocks below are computed again one by one. Kept lower down,
it would still live beside each of these. And of the blocks above those that train, the uppermost are in every backward,
whereas the lowest record nothing where what trains lies above them (HiFT): keeping them would spare nothing.

Transformers gives each block a function that checkpoints it, and a switch. One of ours stands in for the function and
decides block by block; the switch stays theirs (`activation_checkpointing_enable`, and before
transformers 5.23 `gradient_checkpointing_enable`), and where it is off, so is this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from slivertune.core.activation_room import ActivationRoom
from slivertune.core.module_hook import ModelHandle, ModuleHook, StandIn
from slivertune.core.setting_checks import check_integer
from slivertune.core.transformers_internals import checkpointing_of, set_checkpointing

NumKept: TypeAlias = int | Literal["auto"]
"""How many blocks keep their activations; "auto": as many as the device has room for."""


def keep_activations(model: nn.Module, num_blocks: NumKept) -> KeptActivationsHandle:
    """Let the uppermost blocks of a model that is checkpointed keep their activations.

    Losses, gradients and weights stay the same to the bit. Each such block costs the memory of its activations from
    its forward to its backward, and spares its second forward.

    Args:
        model: A transformers model with checkpointing switched on, or a PEFT model around one.
        num_blocks: How many, from 0 to all; or "auto" on a CUDA device: none in the first two backwards of each kind
            (a group's turn, say), in which needs are measured, then as many as there is room for. A batch with more
            tokens, or longer sequences, than were measured is checkpointed whole, and measured. Where a forward is
            measured, torch's statistics of the device's peak memory begin anew.

    Returns:
        Takes it off again; also a context manager.

    Raises:
        ValueError: If the model has no such blocks or fewer, if checkpointing is off, or if "auto" can't measure.
        RuntimeError: If the model keeps activations already.

    Example:
        >>> model.activation_checkpointing_enable()
        >>> with slivertune.keep_activations(model, 8):
        ...     train(model)
    """
    handle = KeptActivationsHandle(model, num_blocks)
    if not any(block.gradient_checkpointing for block in handle.blocks):
        handle.remove()
        raise ValueError(
            f"checkpointing is off in {type(model).__name__}, so that every block keeps its activations already; call "
            "model.activation_checkpointing_enable() (before transformers 5.23 gradient_checkpointing_enable) before "
            "keep_activations, or leave keep_activations out"
        )
    return handle


class KeptActivationsHandle(ModelHandle):
    """A model whose uppermost blocks keep their activations; also a context manager, which ends that at its end.

    Args:
        model: As `keep_activations` takes it; checkpointing may be switched on later.
        num_blocks: How many blocks, or "auto".
    """

    refusal_to_copy = (
        "a KeptActivationsHandle belongs to one model and is neither copied nor pickled; a copy of the model computes "
        "all its checkpointed blocks again: call keep_activations on it"
    )

    def __init__(self, model: nn.Module, num_blocks: NumKept) -> None:
        super().__init__()
        self.blocks = find_checkpointed_blocks(model)
        """What transformers checkpoints, from the bottom to the top."""
        self._num_blocks = num_blocks
        self._room: ActivationRoom | None = None
        if num_blocks == "auto":
            self._room = ActivationRoom(model, len(self.blocks))
        else:
            check_num_kept(num_blocks, len(self.blocks), type(model).__name__)
        if any(block in _keeping for block in self.blocks):
            raise RuntimeError(
                f"{type(model).__name__} keeps activations of some blocks already; remove() that handle first"
            )
        _keeping.update(self.blocks)
        self._undo.append(lambda: _keeping.difference_update(self.blocks))
        self._place_of = {
            layer: index
            for index, block in enumerate(self.blocks)
            for layer in block.modules()
            if isinstance(layer, GradientCheckpointingLayer)
        }
        self._put()
        self._undo.append(self._take_off)
        # Checkpointing that is switched on anew comes with a function of its own.
        for module in _holders_of(model, self.blocks):
            self._undo.append(module.register_forward_pre_hook(ModuleHook(self._put)).remove)
        if self._room is not None:
            begin, end = ModuleHook(self._room.expect_forward), ModuleHook(self._room.end_forward)
            self._undo.append(model.register_forward_pre_hook(begin).remove)
            self._undo.append(model.register_forward_hook(end, always_call=True).remove)

    @property
    def num_kept(self) -> int:
        """How many blocks keep their activations; with "auto" as it was in the last training forward."""
        return self._room.num_kept if isinstance(self._num_blocks, str) else self._num_blocks  # type: ignore[union-attr]

    def _put(self, *_: Any) -> None:
        for layer, place in self._place_of.items():
            own = checkpointing_of(layer)
            if own is not None and not isinstance(own, _Checkpointing):
                set_checkpointing(layer, _Checkpointing(own, self, layer, place))

    def _take_off(self) -> None:
        for layer in self._place_of:
            own = checkpointing_of(layer)
            if isinstance(own, _Checkpointing):
                set_checkpointing(layer, own.function)

    def run(self, own: Callable[..., Any], layer: nn.Module, place: int, forward: Any, args: tuple[Any, ...]) -> Any:
        """Run a forward: plainly if its block keeps its activations, else checkpointed.

        Args:
            own: Checkpoints the layer.
            layer: A block, or a layer inside of one that is checkpointed by itself as well.
            place: The block's, from the bottom.
            forward: The layer's.
            args: Of the forward, by position.
        """
        room, is_block = self._room, layer is self.blocks[place]
        if room is not None and is_block:
            room.enter_block(forward, args)
        num_kept = self.num_kept if room is None or room.is_open else 0
        if place >= len(self.blocks) - num_kept:
            return forward(*args)
        return own(forward if room is None or not is_block else room.watch(forward, place), *args)


def find_checkpointed_blocks(model: nn.Module) -> tuple[GradientCheckpointingLayer, ...]:
    """The modules that transformers checkpoints, but for those inside of others, from the bottom to the top.

    Args:
        model: Any module.

    Raises:
        ValueError: If there is none.
    """
    found: list[GradientCheckpointingLayer] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no block that transformers checkpoints by itself "
            "(GradientCheckpointingLayer), so none can keep its activations alone; leave keep_activations out"
        )
    return tuple(found)


def check_num_kept(num_blocks: Any, num_present: int | None = None, model_name: str = "the model") -> None:
    """Refuse a number of blocks that can't be.

    Args:
        num_blocks: The number.
        num_present: How many blocks there are; None where that is not known yet.
        model_name: In the error.

    Raises:
        ValueError: Naming the number and the rule.
    """
    if isinstance(num_blocks, str):
        raise ValueError(f"keep_activations={num_blocks!r} must be an integer or 'auto'")
    check_integer("keep_activations", num_blocks, 0)
    if num_present is not None and num_blocks > num_present:
        raise ValueError(
            f"keep_activations={num_blocks} must be at most {num_present}, which are all blocks of {model_name}; to "
            "keep the activations of all, leave checkpointing out"
        )


def without_checkpointing(num_blocks: object) -> str:
    """Why activations can't be kept without checkpointing, in the words that planning and training share.

    Args:
        num_blocks: What it was asked for.
    """
    return (
        f"--keep_activations {num_blocks} spares blocks that --gradient_checkpointing would compute again; add "
        "--gradient_checkpointing true, or leave --keep_activations out: without checkpointing every block keeps its "
        "activations"
    )


_keeping: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Checkpointing(StandIn):
    """Stands in for what checkpoints a layer.

    Args:
        function: The layer's own.
        handle: Decides.
        layer: The layer.
        place: Of its block, from the bottom.
    """

    def __init__(
        self, function: Callable[..., Any], handle: KeptActivationsHandle, layer: nn.Module, place: int
    ) -> None:
        super().__init__(function)
        self.keywords = getattr(function, "keywords", {})
        """What `torch.utils.checkpoint.checkpoint` is called with: whether it is reentrant is read there."""
        self._handle, self._layer, self._place = handle, layer, place

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Run the forward, checkpointed or not."""
        return self._handle.run(self.function, self._layer, self._place, forward, args)


def _holders_of(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules that hold a block: those by which a model, or a part of it, is called."""
    wanted = set(blocks)
    for module in model.modules():
        if module not in wanted and any(each in wanted for each in module.modules()):
            yield module
