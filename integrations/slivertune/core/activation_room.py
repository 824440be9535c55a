"""How many blocks may keep their activations, measured: the room on the device, and what a block takes.

Forwards are of one *kind* if the same parameters train in them, and gradients of earlier ones are there or not: a turn
of a HiFT group, or a micro-batch after the first. Of each kind two forwards are measured with all blocks checkpointed:
in the first, much of the optimizer's state is made; the second meets it. Measured are the *need*, by how much the
highest moment of forward and backward lies above the allocated memory at the first block, and what a block takes, the
growth of the allocated memory while it is computed again: what it keeps, without its input, which a checkpoint keeps,
too. From then on, as many blocks keep as fit beside the need into what is free when the first block begins.

That is never too many: a kept block adds its activations to some moments of the step, and the highest moment rises by
that at most.
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
"""Of what the process may allocate, this share stays free: gaps between the allocator's blocks."""
_FORWARDS_TO_MEASURE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a device as torch's allocator sees it, in bytes."""

    allocated: int
    """Of living tensors."""
    highest: int
    """The most that were allocated since the peak began anew."""
    limit: int
    """The most that this process could allocate."""


def read_memory(device: torch.device, *, begin_peak: bool = False) -> DeviceMemory:
    """Ask a CUDA device for its memory.

    Args:
        device: The device.
        begin_peak: Whether `highest` begins anew.
    """
    if begin_peak:
        torch.cuda.reset_peak_memory_stats(device)
    return DeviceMemory(
        allocated=torch.cuda.memory_allocated(device),
        highest=torch.cuda.max_memory_allocated(device),
        limit=usable_bytes(device),
    )


def check_can_measure(device_type: str, world_size: int) -> None:
    """Refuse to measure where there is nothing to ask, or where ranks would come to different numbers.

    Args:
        device_type: Where the model is.
        world_size: Processes of the run.

    Raises:
        ValueError: Naming the reason and the way out.
    """
    if device_type != "cuda":
        raise ValueError(
            f"keep_activations='auto' asks a CUDA device for its free memory, and the model is on {device_type!r}, "
            "where nothing tells how much may be taken; give a number of blocks, from 0 to all"
        )
    if world_size > 1:
        raise ValueError(
            f"keep_activations='auto' is measured in one process, and of {world_size} each might keep another number "
            "and wait for the others in another order; give a number of blocks, from 0 to all"
        )


@dataclass(slots=True)
class _Kind:
    """What forwards of one kind took."""

    num_measured: int = 0
    batches: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and lengths that were measured, none of them less than another in both."""
    need_bytes: int = 0
    """The most above what is allocated at the first block."""
    bytes_of_block: dict[int, int] = field(default_factory=dict)
    """By place, what a block keeps beyond its input; one that was not computed again records nothing."""

    def knows(self, num_tokens: int, length: int) -> bool:
        """Whether such a batch takes no more than one that was measured, also in attention."""
        is_measured = self.num_measured >= _FORWARDS_TO_MEASURE
        return is_measured and any(num_tokens <= most and length <= longest for most, longest in self.batches)

    def add(self, num_tokens: int, length: int) -> None:
        """Such a batch was measured."""
        self.num_measured += 1
        larger = [each for each in self.batches if each[0] > num_tokens or each[1] > length]
        self.batches = [*larger, (num_tokens, length)]


class ActivationRoom:
    """Decides in each training forward how many blocks keep their activations.

    Args:
        model: The model, where it will be trained.
        num_blocks: How many blocks it has.

    Raises:
        ValueError: If nothing can be measured.
    """

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        self._parameters = tuple(model.parameters())
        self._device = self._parameters[0].device
        check_can_measure(self._device.type, dist.get_world_size() if dist.is_initialized() else 1)
        self.num_kept = 0
        """Of the forward that runs, or ran last."""
        self.is_open = False
        """Whether a forward of the model runs, in which blocks may keep."""
        self._num_blocks = num_blocks
        self._kinds: dict[Any, _Kind] = {}
        self._is_expected = False
        self._running: _MeasuredForward | None = None

    def expect_forward(self, *_: Any) -> None:
        """A forward begins; the next block that is entered is its first."""
        self.is_open = self._is_expected = torch.is_grad_enabled()
        if self.is_open:
            self.num_kept, self._running = 0, None

    def end_forward(self, *_: Any) -> None:
        """The forward is over; a block that is called on its own is checkpointed."""
        self.is_open = self._is_expected = False

    def enter_block(self, forward: Any, args: tuple[Any, ...]) -> None:
        """A block is about to run; decide, if it is the first of a forward.

        Args:
            forward: The block's, with its arguments by name (`functools.partial`).
            args: Those by position; the first tensor of all has the shape (batch, length, ...).
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
        """A block's forward that is measured where it runs again; the forward itself in forwards that are not measured.

        Args:
            forward: The block's.
            place: The block's, from the bottom.
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
        """Run a block's forward; measure it where it runs again, in the backward."""
        if running_backward() == NO_BACKWARD or self._is_over:
            return forward(*args)
        if not self._bytes_of_block:
            at_end_of_backward(self._end)
        before = read_memory(self._device).allocated
        try:
            return forward(*args)
        finally:
            # Non-reentrant checkpointing leaves the forward by an exception, as soon as it has what it wants.
            grown = read_memory(self._device).allocated - before
            # A block that runs twice in a forward keeps what it has computed each time.
            self._bytes_of_block[place] = self._bytes_of_block.get(place, 0) + grown

    def _end(self) -> None:
        kind, self._is_over = self._kind, True
        kind.add(self._num_tokens, self._length)
        for place, num_bytes in self._bytes_of_block.items():
            kind.bytes_of_block[place] = max(kind.bytes_of_block.get(place, 0), num_bytes)
        kind.need_bytes = max(kind.need_bytes, read_memory(self._device).highest - self._at_begin)
