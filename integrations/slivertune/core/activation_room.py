"""Measure how many blocks can keep their activations: the free memory of the device, and the bytes per block.

Two forwards are of one *kind* if the same parameters train in them, and if gradients of earlier forwards exist in both
or in neither: a turn of a HiFT group, say, or a micro-batch after the first. Two forwards of each kind are measured
with all blocks checkpointed. The first creates much of the optimizer state, and the second runs beside it. The *need*
is the peak memory of forward and backward minus the memory allocated at the first block. The bytes of a block are the
growth of the allocated memory while it is recomputed. They leave out its input, which a checkpoint keeps, too. From
then on, as many blocks keep their activations as fit beside the need into the free memory at the first block.

This number is never too large. A kept block adds its activations to some moments of the step, so the peak rises by at
most that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slivertune.core.device_memory import usable_bytes
from slivertune.core.torch_internals import NO_BACKWARD, at_end_of_backward, running_backward

MARGIN_SHARE = 0.05
"""Share of the memory available to the process that stays free, for gaps between the allocator's blocks."""
_FORWARDS_TO_MEASURE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes, as torch's allocator sees it."""

    allocated: int
    """Bytes of live tensors."""
    highest: int
    """Largest number of allocated bytes since the last reset of the peak."""
    limit: int
    """Largest number of bytes that this process could allocate."""


def read_memory(device: torch.device, *, begin_peak: bool = False) -> DeviceMemory:
    """Read the memory statistics of a CUDA device.

    Args:
        device: The CUDA device.
        begin_peak: Whether to reset the peak, so that `highest` starts anew.
    """
    if begin_peak:
        torch.cuda.reset_peak_memory_stats(device)
    return DeviceMemory(
        allocated=torch.cuda.memory_allocated(device),
        highest=torch.cuda.max_memory_allocated(device),
        limit=usable_bytes(device),
    )


def check_can_measure(device_type: str, world_size: int) -> None:
    """Refuse to measure without a CUDA device, or in several ranks, which could choose different numbers.

    Args:
        device_type: Device type of the model, such as `cuda`.
        world_size: Number of processes of the run.

    Raises:
        ValueError: If the device is not a CUDA device, or if there are several processes.
    """
    if device_type != "cuda":
        raise ValueError(
            "keep_activations='auto' needs a CUDA device, whose free memory can be read, and the model is on "
            f"{device_type!r}. Give a number of blocks, from 0 to all"
        )
    if world_size > 1:
        raise ValueError(
            f"keep_activations='auto' is measured in one process, and {world_size} processes might choose different "
            "numbers and block each other. Give a number of blocks, from 0 to all"
        )


@dataclass(slots=True)
class _Kind:
    """Measurements of the forwards of one kind."""

    num_measured: int = 0
    batches: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and length of each measured batch, except batches that a later one covers."""
    need_bytes: int = 0
    """Peak memory in bytes above the memory allocated at the first block."""
    bytes_of_block: dict[int, int] = field(default_factory=dict)
    """Bytes that each block keeps beyond its input, by index. A block that was not recomputed has no entry."""

    def knows(self, num_tokens: int, length: int) -> bool:
        """Return whether such a batch needs no more memory than a measured one, in attention, too."""
        is_measured = self.num_measured >= _FORWARDS_TO_MEASURE
        return is_measured and any(num_tokens <= most and length <= longest for most, longest in self.batches)

    def add(self, num_tokens: int, length: int) -> None:
        """Record that such a batch was measured."""
        self.num_measured += 1
        larger = [each for each in self.batches if each[0] > num_tokens or each[1] > length]
        self.batches = [*larger, (num_tokens, length)]


class ActivationRoom:
    """Decides in each training forward how many blocks keep their activations.

    Args:
        model: The model, on the device where it will be trained.
        num_blocks: Number of its blocks.

    Raises:
        ValueError: If nothing can be measured.
    """

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        self._parameters = tuple(model.parameters())
        self._device = self._parameters[0].device
        check_can_measure(self._device.type, dist.get_world_size() if dist.is_initialized() else 1)
        self.num_kept = 0
        """Number of blocks that keep their activations in the current forward, or in the last one."""
        self.is_open = False
        """Whether a forward of the model is running in which blocks may keep their activations."""
        self._num_blocks = num_blocks
        self._kinds: dict[Any, _Kind] = {}
        self._is_expected = False
        self._running: _MeasuredForward | None = None

    def expect_forward(self, *_: Any) -> None:
        """Mark the start of a forward. The next block that is entered is its first."""
        self.is_open = self._is_expected = torch.is_grad_enabled()
        if self.is_open:
            self.num_kept, self._running = 0, None

    def end_forward(self, *_: Any) -> None:
        """Mark the end of the forward. A block that is called on its own is then checkpointed."""
        self.is_open = self._is_expected = False

    def enter_block(self, forward: Any, args: tuple[Any, ...]) -> None:
        """Choose the number of kept blocks, if this block is the first of a forward.

        Args:
            forward: The block's forward, with its keyword arguments bound (`functools.partial`).
            args: Positional arguments. The first tensor of all arguments has shape (batch, length, ...).
        """
        if not self._is_expected:
            return
        self._is_expected = False
        given = (*args, *getattr(forward, "keywords", {}).values())
        hidden = next(each for each in given if isinstance(each, torch.Tensor))
        num_tokens, length = hidden.shape[:-1].numel(), hidden.shape[1:2].numel()
        kind = self._kinds.setdefault(self._kind_of_forward(), _Kind())
        if not kind.knows(num_tokens, length):
            at_begin = read_memory(self._device, begin_peak=True).allocated
            self._running = _MeasuredForward(self._device, kind, num_tokens, length, at_begin)
            return
        memory = read_memory(self._device)
        free = memory.limit - memory.allocated - kind.need_bytes - round(MARGIN_SHARE * memory.limit)
        for place in reversed(range(self._num_blocks)):
            free -= kind.bytes_of_block.get(place, 0)
            if free < 0:
                break
            self.num_kept += 1

    def watch(self, forward: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Wrap a block's forward so that its recomputation is measured. Return it unchanged if this forward is not.

        Args:
            forward: The block's forward.
            place: Index of the block, from the bottom.
        """
        return forward if self._running is None or not self.is_open else partial(self._running.run, place, forward)

    def _kind_of_forward(self) -> tuple[Any, ...]:
        has_gradients = any(each.grad is not None for each in self._parameters)
        return has_gradients, tuple(index for index, each in enumerate(self._parameters) if each.requires_grad)


class _MeasuredForward:
    """A forward whose blocks are all checkpointed, and its backward."""

    def __init__(self, device: torch.device, kind: _Kind, num_tokens: int, length: int, at_begin: int) -> None:
        self._device, self._kind = device, kind
        self._num_tokens, self._length, self._at_begin = num_tokens, length, at_begin
        self._is_over = False
        self._bytes_of_block: dict[int, int] = {}

    def run(self, place: int, forward: Callable[..., Any], *args: Any) -> Any:
        """Run a block's forward, and measure it if it runs again in the backward."""
        if running_backward() == NO_BACKWARD or self._is_over:
            return forward(*args)
        if not self._bytes_of_block:
            at_end_of_backward(self._end)
        before = read_memory(self._device).allocated
        try:
            return forward(*args)
        finally:
            # Non-reentrant checkpointing raises to leave the forward as soon as it has all tensors that it needs.
            grown = read_memory(self._device).allocated - before
            # A block that runs twice in a forward keeps the activations of both runs.
            self._bytes_of_block[place] = self._bytes_of_block.get(place, 0) + grown

    def _end(self) -> None:
        kind, self._is_over = self._kind, True
        kind.add(self._num_tokens, self._length)
        for place, num_bytes in self._bytes_of_block.items():
            kind.bytes_of_block[place] = max(kind.bytes_of_block.get(place, 0), num_bytes)
        kind.need_bytes = max(kind.need_bytes, read_memory(self._device).highest - self._at_begin)
