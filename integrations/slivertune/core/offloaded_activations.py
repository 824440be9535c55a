"""Offload the inputs of checkpointed blocks to host memory until the backward needs them.

Checkpointing keeps one tensor per block, its hidden states, which at long sequences are most of the kept memory. Each
is copied out during its block's forward, and comes back during the backward of the block above. A block that records
nothing (below the trained layers, under HiFT) keeps nothing, so nothing of it is copied.

torch's own `torch.autograd.graph.saved_tensors_hooks` carries the tensors. `save_on_cpu` of the same module copies on
the computing stream, both ways. TRL's `OffloadActivations`, which is torchtune's, has its own streams, which no plan
would see. It copies every tensor that an operator saves, even if nothing below trains and no backward will ask for it.
It keeps five more tensors on the device meanwhile, and pins memory anew in each step.
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
    """Offload the inputs of a model's checkpointed blocks to host memory from the forward to the backward.

    Losses, gradients and weights stay the same to the bit. The device holds one input in the forward and two in the
    backward. Host memory (pinned on CUDA) holds one per recording block, and is kept for the next step.

    Args:
        model: A transformers model with checkpointing switched on, or a PEFT model around one.

    Returns:
        Handle that restores the model. Also a context manager.

    Raises:
        ValueError: If the model has no such blocks, or if checkpointing is off.
        RuntimeError: If the model's activations are offloaded already, or it has a feature that does not go with that
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
            f"checkpointing is off in {type(model).__name__}, and offload_activations offloads the inputs that it "
            "keeps. Call model.activation_checkpointing_enable() (before transformers 5.23 "
            "gradient_checkpointing_enable) before offload_activations, or leave it out"
        )
    return handle


class OffloadedActivationsHandle(CheckpointedBlocksHandle):
    """Handle of a model whose checkpointed blocks offload their inputs. Also a context manager.

    Args:
        model: The model, as for `offload_activations`. Checkpointing may be switched on later.
    """

    feature: Feature | None = "offload_activations"
    is_innermost: ClassVar[bool] = True  # a block that keeps its activations is neither checkpointed nor offloaded
    refusal_to_copy = (
        "an OffloadedActivationsHandle belongs to one model and is neither copied nor pickled. A copy of the model "
        "keeps the inputs of its blocks on the device. Call offload_activations on it"
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if any(block in _offloading for block in self.blocks):
            raise RuntimeError(
                f"{type(model).__name__} has its activations offloaded already. Call remove() on that handle first"
            )
        _offloading.update(self.blocks)
        self._undo.append(lambda: _offloading.difference_update(self.blocks))
        self._waiting: dict[torch.device, WaitingActivations] = {}
        # The host memory is freed with the handle.
        self._undo.append(self._waiting.clear)
        self.put(model)

    def run(self, own: Callable[..., Any], layer: nn.Module, place: int, forward: Any, args: tuple[Any, ...]) -> Any:
        """Run a checkpointed forward whose input is offloaded."""
        # A layer inside a block keeps its input only from the block's second forward to the backward right after it.
        if layer is not self.blocks[place] or not records_graph(layer, (args, getattr(forward, "keywords", {}))):
            return own(forward, *args)
        hidden = args[0] if args else None
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            raise RuntimeError(
                f"{type(layer).__name__} does not get its hidden states as its first positional argument, so "
                "offload_activations can't reach them. Call remove() on its handle"
            )
        waiting = self._waiting_on(hidden.device)
        # The graph holds both functions, so they must not hold the tensor.
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
                f"{type(layer).__name__} writes into its hidden states in place while they are copied to the host. "
                "Call remove() on the handle of offload_activations"
            )
        return output

    def _waiting_on(self, device: torch.device) -> WaitingActivations:
        if device not in self._waiting:
            self._waiting[device] = WaitingActivations(device)
        return self._waiting[device]


def offloading_without_checkpointing() -> str:
    """Explain why nothing is offloaded without checkpointing. Planning and training share this text."""
    return (
        "--offload_activations offloads the block inputs that --gradient_checkpointing keeps. Add "
        "--gradient_checkpointing true, or leave --offload_activations out"
    )


_offloading: weakref.WeakSet[nn.Module] = weakref.WeakSet()
