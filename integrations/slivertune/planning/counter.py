"""Counter of a step's work: floating-point operations, bytes of device memory, and bytes over the bus.

The step is the one that the memory plan runs on fake tensors. A dispatch mode sees each operator. Memory that an owner
claimed for the host or for files (`core.ledger`) is off the device, and all other memory is on it. A copy between the
two crosses the bus. Operators on host memory alone take no time of the device.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from slivertune.core.copy_streams import Direction
from slivertune.core.layers import find_blocks
from slivertune.core.ledger import Watch, claimed_as
from slivertune.core.outputs import tensors_of
from slivertune.core.repeated_work import num_repeats, num_stood_for
from slivertune.core.torch_internals import (
    ASKS_FOR_DEVICE,
    FLOP_FORMULAS,
    NO_BACKWARD,
    FakeTensor,
    TorchDispatchMode,
    arguments_of,
    is_wrapper_type,
    running_backward,
    running_fake_mode,
    running_modes,
    storage_key,
)
from slivertune.hift.tiled_steps import TILE_BYTES
from slivertune.planning.fake import FakeOverrides, UncompiledMode
from slivertune.planning.kernels import attention_seen_by
from slivertune.planning.operator_cache import UNKNOWN, CachedFakeTensorMode
from slivertune.planning.step_work import STATE, STEP, Place, Work

_WRITES_NOTHING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_READS_NO_VALUES = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_"}
)
_READS_WHERE_INDICES_SAY = frozenset({"embedding", "index_select", "gather", "index"})
_COPIES = frozenset({"copy_", "_to_copy", "clone"})
_OFF_DEVICE = frozenset({"host", "host_activations", "disk"})
_counting: list["WorkCounter"] = []
_beside: list[None] = []


@contextmanager
def beside_computation() -> Iterator[None]:
    """Leave out the operators inside, which run on a copy stream, but count their copies over the bus."""
    _beside.append(None)
    try:
        yield
    finally:
        _beside.pop()


@contextmanager
def computing_again() -> Iterator[None]:
    """Tell counters that a block's forward is recomputed inside its backward."""
    counters = list(_counting)
    for counter in counters:
        counter.is_again = True
    try:
        yield
    finally:
        for counter in counters:
            counter.is_again = False


class WorkCounter(UncompiledMode):
    """Counts operators by the part of a step that they belong to.

    Args:
        model: Model whose blocks a backward counts one by one, and whose state updates count as `STEP`; None without.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._tells_updates = model is not None
        self._blocks = (
            [] if model is None else [block for _, block in find_blocks(model, are_needed=False, with_attention=False)]
        )
        self._counted: dict[tuple[Hashable, Place], Work] = {}
        self._part: Hashable = None
        self._block: int | None = None
        self.is_again = False
        """Whether the block's forward is being recomputed."""
        self._cache: CachedFakeTensorMode | None = None
        """Operators that ran before, whose results need not pass through the other modes. None if one is unknown."""
        self._told: list[Watch | WorkCounter] = []
        """Other modes to tell of these operators, in their order."""

    @contextmanager
    def counting(self, part: Hashable) -> Iterator[None]:
        """Count the operators inside as one part of the step."""
        self._part, self._block = part, None
        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                hook = partial(self._watch_outputs, index)
                stack.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
            _counting.append(self)
            stack.callback(_counting.remove, self)
            stack.enter_context(attention_seen_by(self.add))
            fake, modes = running_fake_mode(), running_modes()
            if isinstance(fake, CachedFakeTensorMode) and all(map(_only_watches, modes)):
                self._cache, self._told = fake, [mode for mode in modes if isinstance(mode, (Watch, WorkCounter))]
            stack.callback(self._forget_modes)
            stack.enter_context(self)
            yield

    def _forget_modes(self) -> None:
        self._cache, self._told = None, []

    def work_of(self, part: Hashable) -> Work:
        """Return the work of a part of the step."""
        return sum(self.by_place(part).values(), Work())

    def by_place(self, part: Hashable) -> dict[Place, Work]:
        """Return the work of a part of the step, by place."""
        return {place: work for (of, place), work in self._counted.items() if of == part}

    def add(self, flops: int, num_bytes: int, number: int) -> None:
        """Count operators of the current part."""
        if (flops or num_bytes) and not _beside:
            self._work().operators[flops, num_bytes] += number * num_repeats()

    def _work(self, *, updates_state: bool = False) -> Work:
        place = None if self._block is None else (self._block, self.is_again)
        # A backward may also update state.
        key = (STEP, None) if self._tells_updates and updates_state else (self._part, place)
        work = self._counted.get(key)
        if work is None:
            work = self._counted[key] = Work()
        return work

    def _watch_outputs(self, index: int, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Detect the beginning of a block's backward by the gradients of the block's outputs."""
        if running_backward() != NO_BACKWARD:
            return
        # The gradient of an input that the block passes on arrives in the middle of another block's backward.
        passed_on = {id(each) for each in tensors_of((args, kwargs))}
        for tensor in tensors_of(output):
            if tensor.requires_grad and id(tensor) not in passed_on:
                tensor.register_hook(lambda gradient: self._enter(index))

    def _enter(self, block: int) -> None:
        self._block = block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_FOR_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # which torch asks more often than it computes
        if any(is_wrapper_type(each) for each in types):
            return NotImplemented  # the operators inside the wrapper count
        kwargs = kwargs or {}
        out = UNKNOWN if self._cache is None else self._cache.made(func, args, kwargs)
        if out is not UNKNOWN:
            for mode in self._told:
                if isinstance(mode, Watch):
                    mode.show(out)
                else:
                    mode._see(func, args, kwargs, out)
            self._see(func, args, kwargs, out)
            return out
        out = func(*args, **kwargs)
        self._see(func, args, kwargs, out)
        return out

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        known = _properties_of(func)
        if known.writes:
            self._note(known, args, kwargs, out)

    def _note(self, func: "_Properties", args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        read, written = _touched(func, args, kwargs, out)
        if not written:
            return  # the operator only reads a shape or a number
        places = [claimed_as(tensor) for tensor in (*read, *written)]
        is_off = [place in _OFF_DEVICE for place in places]
        if func.copies and any(is_off) and not all(is_off):
            direction: Direction = "outbound" if is_off[-1] else "inbound"
            on_device = next(place for place, off in zip(places, is_off, strict=True) if not off)
            self._work().copies[direction, on_device or "activations"] += num_repeats() * read[0].nbytes
            return
        flops = func.flops(*args, **kwargs, out_val=out) if func.flops is not None else 0
        touched = [each for each, off in zip((*read, *written), is_off, strict=True) if not off]
        num_bytes = sum(map(_num_bytes, touched))
        if not (flops or num_bytes) or _beside:
            return
        work, number = self._work(updates_state=STATE in places), num_stood_for()
        if number is None:
            work.operators[flops, num_bytes] += num_repeats()
        else:
            num_small = sum(_num_bytes(each) for each in touched if each.untyped_storage().nbytes() <= TILE_BYTES)
            work.tiles[num_bytes - num_small, num_small] += number * num_repeats()


def _only_watches(mode: TorchDispatchMode) -> bool:
    """Return whether a mode is told of an operator here, or changes none that ran before."""
    return isinstance(mode, (Watch, WorkCounter, FakeOverrides))


@dataclass(frozen=True, slots=True)
class _Properties:
    """Use that an operator makes of its arguments."""

    arguments: Sequence[tuple[str, bool, bool]]
    """Name of each argument, and whether it is read and written."""
    writes: bool
    copies: bool
    reads_values: bool
    reads_where_indices_say: bool
    flops: Callable[..., int] | None
    """Formula of its floating-point operations, or None if it has none."""


@cache
def _properties_of(func: Any) -> _Properties:
    name = func.overloadpacket.__name__
    return _Properties(
        arguments=[
            (argument, not is_written or (name != "copy_" and argument != "out"), is_written)
            for argument, is_written in arguments_of(func)
        ],
        writes=not func.is_view and name not in _WRITES_NOTHING,
        copies=name in _COPIES,
        reads_values=name not in _READS_NO_VALUES,
        reads_where_indices_say=name in _READS_WHERE_INDICES_SAY,
        flops=FLOP_FORMULAS.get(func.overloadpacket),
    )


def _touched(
    func: _Properties, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator reads, and the tensors that it writes."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for position, (argument, is_read, is_written) in enumerate(func.arguments):
        tensors = _tensors(args[position] if position < len(args) else kwargs.get(argument))
        if is_written:
            written += tensors
        if is_read:
            read += tensors
    known = {storage_key(each.untyped_storage()) for each in (*read, *written)}
    fresh = [each for each in _tensors(out) if storage_key(each.untyped_storage()) not in known]
    if not func.reads_values:
        read = []
    elif func.reads_where_indices_say:
        read = [*read[1:], *fresh]  # as many bytes of the table as the result has
    return read, written + fresh


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.device.type != "meta" else []
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in _tensors(item)]
    return []


def _num_bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is in memory only once.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
