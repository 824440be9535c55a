"""Offloading under checkpointing: the inputs of checkpointed blocks wait in host memory until the backward needs them.

Checkpointing keeps one tensor of each block, its hidden states, which at long sequences are most of what is kept. Each
is copied out under its block's forward and comes back under the backward of the block above. A block that records
nothing (below what trains, under HiFT) keeps nothing, and nothing of it is copied.

torch's own `torch.autograd.graph.saved_tensors_hooks` carries it. `save_on_cpu` of the same module copies on the
computing stream, both ways. TRL's `OffloadActivations`, which is torchtune's, has streams of its own, which no plan
would see; it copies whatever an operator saves, also where nothing below trains and no backward will ask for it, keeps
five tensors more on the device meanwhile, and pins memory anew in each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slivertune.core.checkpointed_blocks import CheckpointedBlocksHandle, records_graph
from slivertune.core.refused_pairs import Feature
from slivertune.core.torch_internals import storage_key, version_of
from slivertune.core.waiting_activations import WaitingActivation, WaitingActivations


def offload_activations(model: nn.Module) -> OffloadedActivationsHandle:
    """Let the inputs of a model's checkpointed blocks wait in host memory from the forward to the backward.

    Losses, gradients and weights stay the same to the bit. On the device are one input in the forward and two in the
    backward; on the host, pinned on CUDA, one for each block that records anything, kept for the next step.

    Args:
        model: A transformers model with checkpointing switched on, or a PEFT model around one.

    Returns:
        Takes it off again; also a context manager.

    Raises:
        ValueError: If the model has no such blocks, or if checkpointing is off.
        RuntimeError: If the model's activations are offloaded already, or it has what does not go with that
            (torch.compile, keep_activations='auto').

    Example:
        >>> model.activation_checkpointing_enable()
        >>> with slivertune.offload_activations(model):
        ...     train(model)
    """
    handle = OffloadedActivationsHandle(model)
    if not handle.is_switched_on:
        handle.remove()
        raise ValueError(
            f"checkpointing is off in {type(model).__name__}, and offload_activations moves what it keeps; call "
            "model.activation_checkpointing_enable() (before transformers 5.23 gradient_checkpointing_enable) before "
            "offload_activations, or leave it out"
        )
    return handle


class OffloadedActivationsHandle(CheckpointedBlocksHandle):
    """A model whose checkpointed blocks let their inputs wait on the host; also a context manager, which ends that.

    Args:
        model: As `offload_activations` takes it; checkpointing may be switched on later.
    """

    feature: Feature | None = "offload_activations"
    is_innermost: ClassVar[bool] = True  # what keeps its activations after all is not checkpointed, nor offloaded
    refusal_to_copy = (
        "an OffloadedActivationsHandle belongs to one model and is neither copied nor pickled; a copy of the model "
        "keeps the inputs of its blocks on the device: call offload_activations on it"
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if any(block in _offloading for block in self.blocks):
            raise RuntimeError(
                f"{type(model).__name__} has its activations offloaded already; remove() that handle first"
            )
        _offloading.update(self.blocks)
        self._undo.append(lambda: _offloading.difference_update(self.blocks))
        self._waiting: dict[torch.device, WaitingActivations] = {}
        # The memory on the host goes with the handle.
        self._undo.append(self._waiting.clear)
        self.put(model)

    def run(self, own: Callable[..., Any], layer: nn.Module, place: int, forward: Any, args: tuple[Any, ...]) -> Any:
        """Run a checkpointed forward whose input waits on the host."""
        # A layer inside a block keeps its input from the block's second forward to its backward, right after it.
        if layer is not self.blocks[place] or not records_graph(layer, (args, getattr(forward, "keywords", {}))):
            return own(forward, *args)
        hidden = args[0] if args else None
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            raise RuntimeError(
                f"{type(layer).__name__} is not given its hidden states as the first of its arguments by position, so "
                "that checkpointing keeps them out of reach; remove() offload_activations"
            )
        waiting = self._waiting_on(hidden.device)
        # The graph holds on to both functions, which so must not hold on to the tensor.
        key, shape, version = storage_key(hidden.untyped_storage()), hidden.shape, version_of(hidden)

        def pack(tensor: torch.Tensor) -> WaitingActivation | torch.Tensor:
            is_hidden = storage_key(tensor.untyped_storage()) == key and tensor.shape == shape
            return waiting.store(tensor, place) if is_hidden else tensor

        def unpack(packed: WaitingActivation | torch.Tensor) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else waiting.load(packed)

        try:
            with saved_tensors_hooks(pack, unpack):
                output = own(forward, *args)
        finally:
            waiting.settle()
        if version_of(hidden) != version:
            raise RuntimeError(
                f"{type(layer).__name__} writes into its hidden states in place, while they are copied to the host; "
                "remove() offload_activations"
            )
        return output

    def _waiting_on(self, device: torch.device) -> WaitingActivations:
        if device not in self._waiting:
            self._waiting[device] = WaitingActivations(device)
        return self._waiting[device]


def offloading_without_checkpointing() -> str:
    """Why nothing is offloaded without checkpointing, in the words that planning and training share."""
    return (
        "--offload_activations moves what --gradient_checkpointing keeps; add --gradient_checkpointing true, or leave "
        "--offload_activations out"
    )


_offloading: weakref.WeakSet[nn.Module] = weakref.WeakSet()
