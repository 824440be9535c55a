"""Checkpoint by layer: under transformers' own checkpointing, the uppermost blocks keep their activations.

A block that keeps its activations is not recomputed in the backward. The uppermost blocks are chosen, since a backward
begins there. Their activations are needed first, and are gone when the blocks below are recomputed one by one.
Activations kept lower down would still live beside each recomputed block. The uppermost blocks are also in every
backward. The lowest record nothing if the trained layers lie above them (HiFT), so keeping theirs would save nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from slivertune.core.activation_room import ActivationRoom
from slivertune.core.checkpointed_blocks import CheckpointedBlocksHandle
from slivertune.core.module_hook import ModuleHook
from slivertune.core.setting_checks import NumKept, check_num_kept


def keep_activations(model: nn.Module, num_blocks: NumKept) -> KeptActivationsHandle:
    """Let the uppermost blocks of a checkpointed model keep their activations.

    Losses, gradients and weights stay the same to the bit. Each such block costs the memory of its activations from its
    forward to its backward, and saves its second forward.

    Args:
        model: A transformers model with checkpointing switched on, or a PEFT model around one.
        num_blocks: Number of blocks, from 0 to all, or "auto" on a CUDA device. "auto" keeps none in the first two
            backwards of each kind (a group's turn, say), which it measures. Then it keeps as many as there is room for.
            A batch with more tokens, or longer sequences, than any measured batch is checkpointed whole and measured.
            Each measured forward resets torch's statistics of the device's peak memory.

    Returns:
        Handle that restores the model. Also a context manager.

    Raises:
        ValueError: If the model has no such blocks or fewer, if checkpointing is off, or if "auto" can't measure.
        RuntimeError: If the model keeps activations already, or "auto" meets offloaded activations.

    Example:
        >>> model.activation_checkpointing_enable()
        >>> with slivertune.keep_activations(model, 8):
        ...     train(model)
    """
    handle = KeptActivationsHandle(model, num_blocks)
    if not handle.is_switched_on:
        handle.remove()
        raise ValueError(
            f"checkpointing is off in {type(model).__name__}, so every block keeps its activations already. Call "
            "model.activation_checkpointing_enable() (before transformers 5.23 gradient_checkpointing_enable) before "
            "keep_activations, or leave keep_activations out"
        )
    return handle


class KeptActivationsHandle(CheckpointedBlocksHandle):
    """Handle of a model whose uppermost blocks keep their activations. Also a context manager.

    Args:
        model: The model, as for `keep_activations`. Checkpointing may be switched on later.
        num_blocks: Number of blocks, or "auto".
    """

    refusal_to_copy = (
        "a KeptActivationsHandle belongs to one model and is neither copied nor pickled. A copy of the model "
        "recomputes all its checkpointed blocks. Call keep_activations on it"
    )

    def __init__(self, model: nn.Module, num_blocks: NumKept) -> None:
        super().__init__(model)
        self._num_blocks = num_blocks
        self._room: ActivationRoom | None = None
        if num_blocks == "auto":
            self._room, self.feature = ActivationRoom(model, len(self.blocks)), "keep_activations='auto'"
        else:
            check_num_kept(num_blocks, len(self.blocks), type(model).__name__)
        if any(block in _keeping for block in self.blocks):
            raise RuntimeError(
                f"{type(model).__name__} keeps activations of some blocks already. Call remove() on that handle first"
            )
        _keeping.update(self.blocks)
        self._undo.append(lambda: _keeping.difference_update(self.blocks))
        self.put(model)
        if self._room is not None:
            begin, end = ModuleHook(self._room.expect_forward), ModuleHook(self._room.end_forward)
            self._undo.append(model.register_forward_pre_hook(begin).remove)
            self._undo.append(model.register_forward_hook(end, always_call=True).remove)

    @property
    def num_kept(self) -> int:
        """Number of blocks that keep their activations. With "auto", the number of the last training forward."""
        return self._room.num_kept if isinstance(self._num_blocks, str) else self._num_blocks  # type: ignore[union-attr]

    def run(self, own: Callable[..., Any], layer: nn.Module, place: int, forward: Any, args: tuple[Any, ...]) -> Any:
        """Run a forward plainly if its block keeps its activations, else checkpointed."""
        room, is_block = self._room, layer is self.blocks[place]
        if room is not None and is_block:
            room.enter_block(forward, args)
        num_kept = self.num_kept if room is None or room.is_open else 0
        if place >= len(self.blocks) - num_kept:
            return forward(*args)
        return own(forward if room is None or not is_block else room.watch(forward, place), *args)


def keeps_activations(model: nn.Module) -> bool:
    """Return whether `keep_activations` is attached to a model."""
    return any(module in _keeping for module in model.modules())


def without_checkpointing(num_blocks: object) -> str:
    """Explain why activations can't be kept without checkpointing. Planning and training share this text.

    Args:
        num_blocks: The requested number.
    """
    return (
        f"--keep_activations {num_blocks} spares blocks that --gradient_checkpointing would recompute. Add "
        "--gradient_checkpointing true, or leave --keep_activations out: without checkpointing every block keeps its "
        "activations"
    )


_keeping: weakref.WeakSet[nn.Module] = weakref.WeakSet()
