"""Storage of a group's masters and optimizer state between turns: in host memory, mapped files, or `disk` files.

Offloaded state is flat: a value with nested tensors is a `Structure` under its key, and its tensors have own keys.
"""

import errno
import itertools
import math
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slivertune.core.copy_streams import CopyStreams
from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.core.ledger import MemoryTier, claim, claimed_at_birth
from slivertune.core.torch_internals import storage_key
from slivertune.hift.base import CUT_MULTIPLE
from slivertune.hift.chunk import MASTER, Slice, StepCopies, Weight, refresh_master
from slivertune.hift.disk import LentBuffer
from slivertune.hift.group_state import WeightState
from slivertune.hift.nested_state import empty_objects, flatten_state, unflatten_state
from slivertune.hift.probe import StepMeter

_GAPS_BYTES = 512
"""Bytes of gaps between a weight's tensors."""

_WHOLE = -1
"""Start of a slice that stands for the whole weight, whose state was restored."""

# bitsandbytes' 8-bit state: one scale per block of CUT_MULTIPLE elements, and the code book.
_OF_BLOCKS = ("absmax1", "absmax2")
_TABLES = ("qmap1", "qmap2")


class OffloadBuffer:
    """Memory for offloaded tensors.

    Args:
        tier: Memory tier that its bytes count to in the ledger.
        allocate: Function that returns a uint8 buffer of a number of bytes, or raises.
    """

    def __init__(self, tier: MemoryTier, allocate: Callable[[int], torch.Tensor]) -> None:
        self._tier = tier
        self._allocate = allocate
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._used_bytes: dict[torch.dtype, int] = {}

    def reserve(self, num_bytes: Mapping[torch.dtype, int]) -> None:
        """Allocate memory for the tensors to come, so that a lack of memory shows now.

        Each dtype has its own buffer: torch.save refuses tensors of several dtypes in one storage.
        """
        buffers = {dtype: self._claimed(size) for dtype, size in num_bytes.items() if size}
        for dtype, buffer in buffers.items():
            self._buffers[dtype], self._used_bytes[dtype] = buffer, 0

    @property
    def reserved(self) -> Collection[torch.Tensor]:
        """Buffers whose memory is taken next, one of each dtype."""
        return self._buffers.values()

    def alone_like(self, model: torch.Tensor) -> torch.Tensor:
        """Return a tensor with arbitrary content in a buffer of its own, so that what is reserved stays for others."""
        return tensor_at(self._claimed(_bytes_of(model)), 0, model)

    def empty_like(self, model: torch.Tensor) -> torch.Tensor:
        """Return a tensor with arbitrary content, from the reserved buffer while it lasts, else from a new one."""
        dtype = model.dtype
        if dtype not in self._buffers or self._used_bytes[dtype] + model.nbytes > self._buffers[dtype].numel():
            self.reserve({dtype: _bytes_of(model)})
        start = self._used_bytes[dtype]
        self._used_bytes[dtype] += aligned(model.nbytes)
        return tensor_at(self._buffers[dtype], start, model)

    def _claimed(self, num_bytes: int) -> torch.Tensor:
        with claimed_at_birth("state", self._tier):
            buffer = self._allocate(num_bytes)
        claim(buffer, "state", self._tier)
        return buffer


def _bytes_of(tensor: torch.Tensor) -> int:
    return aligned(max(1, tensor.numel()) * tensor.dtype.itemsize)


def host_buffer(streams: CopyStreams) -> OffloadBuffer:
    """Make a buffer in host memory that these streams copy to and from."""
    return OffloadBuffer("host", streams.host_memory)


def mapped_buffer(directory: Path) -> OffloadBuffer:
    """Make a buffer in memory-mapped files under `directory`. Copies from it wait for the disk.

    Files are allocated whole (a full disk is an error, never a SIGBUS) and unlinked as soon as they are mapped, so
    that none is left behind, however the process ends.
    """
    return OffloadBuffer("disk", lambda num_bytes: _mapped(directory, num_bytes))


def _mapped(directory: Path, num_bytes: int) -> torch.Tensor:
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="hift-", suffix=".state", dir=directory)
    try:
        os.posix_fallocate(handle, 0, max(1, num_bytes))
        return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            error.errno,
            f"state_dir={str(directory)!r} has no room for {num_bytes:,} bytes of a group's state "
            f"({os.strerror(error.errno or 0)}). Free space there, name another state_dir, or use state='host'",
        ) from error
    finally:
        os.close(handle)
        Path(name).unlink()


def offloaded_bytes(weights: Sequence[Weight], meter: StepMeter, *, is_measured: bool = False) -> Counter[torch.dtype]:
    """Count the bytes of one group's masters and state that will be offloaded between its steps, by dtype.

    Without `state="disk"`, whose files are allocated whole, state is left out if counting it would take an extra step
    on a dummy weight.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the memory that steps need, with HiFT's settings.
        is_measured: Whether state is counted in any case.
    """
    num_bytes: Counter[torch.dtype] = Counter()
    for weight in weights:
        if meter.steps_master(weight):
            num_bytes[torch.float32] += aligned(weight.parameter.numel() * torch.float32.itemsize)
        if is_measured or counts_state(meter):
            for dtype, state_bytes in meter.needs(weight).state_bytes.items():
                num_bytes[dtype] += aligned(math.ceil(state_bytes)) + _GAPS_BYTES
    return num_bytes


def counts_state(meter: StepMeter) -> bool:
    """Return whether `offloaded_bytes` counts state, not masters alone."""
    return meter.is_elementwise or meter.config.state == "disk"


class StateStore:
    """Offloaded state of one group. Each use of it waits until its tensors are in host memory.

    Args:
        device: Device that computes with the state.
        buffer: Memory of tensors with dimensions.
        lent: Buffer of the group's file, which takes the tensors that fit; None without a file.
    """

    def __init__(self, device: torch.device, buffer: OffloadBuffer, lent: LentBuffer | None = None) -> None:
        self.device = device
        """Device that computes with the state."""
        self._buffer = buffer
        self._lent = lent
        self._wholes: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        """Tensors with dimensions, by weight and key."""
        self._slices: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        """By weight and start of a slice: its parts of the tensors, and its values without dimensions, by key."""
        self._is_for_masters = False
        """Whether the reserved memory is for masters alone."""

    @property
    def is_loaded(self) -> bool:
        """Whether the tensors are in host memory now, so that no use of them waits."""
        return self._lent is None or self._lent.is_loaded

    def load(self) -> None:
        """Wait until the tensors are in host memory.

        Raises:
            OSError: If they can't be read.
        """
        if self._lent is not None and (moved := self._lent.load()) is not None:
            of_slices = itertools.chain.from_iterable(slices.values() for slices in self._slices.values())
            for values in (*self._wholes.values(), *of_slices):
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        values[key] = moved(value)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory or files that hold the tensors, and that are reserved for others."""
        of_slices = (slices.values() for slices in self._slices.values())
        values = (value for state in itertools.chain(self._wholes.values(), *of_slices) for value in state.values())
        tensors = (value for value in itertools.chain(values, self._buffer.reserved) if isinstance(value, torch.Tensor))
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())

    def reserve(self, num_bytes: Mapping[torch.dtype, int], *, for_masters: bool = False) -> None:
        """Allocate memory for the tensors to come, so that a lack of memory shows now. A file has it already.

        Args:
            num_bytes: Bytes by dtype.
            for_masters: Whether they are for masters alone. Then each tensor of state gets memory of its own.
        """
        self._is_for_masters = for_masters
        if self._lent is None:
            self._buffer.reserve(num_bytes)

    def of(self, one: Slice) -> Mapping[str, Any]:
        """Return a slice's state by key: parts of the offloaded tensors, and values without dimensions."""
        self.load()
        slices = self._slices[one.weight.name]
        if one.start in slices:
            return slices[one.start]
        # Restored: every slice starts from the weight's.
        restored = slices.get(_WHOLE, {}).items()
        return {key: _part(value, one, key) if _has_extent(key, value) else value for key, value in restored}

    def receive(self, one: Slice, state: WeightState) -> StepCopies:
        """Take a slice's state after its step. The caller copies what is on the device, behind the computing stream.

        Args:
            one: Stepped slice.
            state: State by key, with the master under `MASTER`.

        Returns:
            Copies to make.
        """
        self.load()
        state = flatten_state(state)
        wholes, slices = self._wholes[one.weight.name], self._slices[one.weight.name]
        known, own = slices.get(one.start, {}), dict(state)
        copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if key in _TABLES and key in wholes:
                own[key] = wholes[key]  # a table never changes, and the next chunk may be loading it
            elif not _has_extent(key, value):
                own[key] = _small_place(value, is_pinned=value.is_cuda)
                if value.device.type == "cpu":
                    own[key].copy_(value.detach())
                else:
                    copies[key] = (value, own[key])
            else:
                place = known.get(key)
                if not isinstance(place, torch.Tensor) or (place.shape, place.dtype) != (value.shape, value.dtype):
                    place = _part(self._whole(one.weight, key, _like_whole(value, one, key)), one, key)
                own[key], copies[key] = place, (value, place)
        slices[one.start] = own
        empty_objects(state)
        return copies

    def take_form(self, one: Slice, like: Slice) -> None:
        """Let a slice that a plan does not step share the tensors of one that was stepped, unless it has its own.

        Only values without dimensions get a place of their own.

        Args:
            one: The slice, a part of its weight.
            like: Stepped slice of the same weight and size.
        """
        slices = self._slices[one.weight.name]
        if one.start not in slices:
            slices[one.start] = {
                key: _small_place(value, is_pinned=False)
                if isinstance(value, torch.Tensor) and not _has_extent(key, value)
                else value
                for key, value in slices[like.start].items()
            }

    def export(self, weights: Sequence[Weight], *, lasts: bool = True) -> dict[str, WeightState]:
        """Return the state of a group's weights, after masters have followed writes of others.

        Args:
            weights: Trained weights of the group.
            lasts: Whether the tensors are read after other groups' were loaded.
        """
        self.load()
        for weight in weights:
            if self.has(weight, MASTER) and not weight.is_quantized:
                master = self._wholes[weight.name][MASTER]
                refresh_master(master, weight.parameter.detach().to(master.device))
        view = self._lent.lasting() if lasts and self._lent is not None else None
        exported: dict[str, WeightState] = {}
        for weight in weights:
            slices, wholes = self._slices[weight.name], self._wholes[weight.name]
            # No slice leaves others here any more.
            kept = {key for of_slice in slices.values() for key, value in of_slice.items() if _has_extent(key, value)}
            state: WeightState = {key: view(wholes[key]) if view else wholes[key] for key in wholes if key in kept}
            # The restored values are out of date once slices were stepped.
            first = min((start for start in slices if start != _WHOLE), default=_WHOLE)
            state.update(item for item in slices.get(first, {}).items() if not _has_extent(*item))
            if state:
                exported[weight.name] = unflatten_state(state, copy_objects=True)
        return exported

    def restore(self, weights: Sequence[Weight], state: Mapping[str, WeightState]) -> None:
        """Copy the state that `export` returned into this store."""
        self.load()
        flat = {each.name: flatten_state(state.get(each.name, {}), copy_objects=True) for each in weights}
        num_bytes: Counter[torch.dtype] = Counter()
        for values in flat.values():
            for key, value in values.items():
                if _has_extent(key, value):
                    num_bytes[value.dtype] += aligned(value.nbytes)
        self.reserve(num_bytes)
        for weight in weights:
            own = self._slices[weight.name][_WHOLE] = flat[weight.name]
            for key, value in own.items():
                if _has_extent(key, value):
                    own[key] = self._whole(weight, key, value).copy_(value)
                elif isinstance(value, torch.Tensor):
                    # A step on a GPU loads it from here. Nobody would wait for a copy that is queued here.
                    value = value.detach().cpu()
                    own[key] = _small_place(value, is_pinned=weight.device.type == "cuda").copy_(value)

    def place(self, weight: Weight, key: str, value: torch.Tensor) -> None:
        """Store a tensor of a weight's shape before any step has left its state here.

        Args:
            weight: Weight that it belongs to.
            key: Key in the weight's state.
            value: Values on the host; copied.
        """
        self.load()
        own = self._slices[weight.name].setdefault(_WHOLE, {})
        own[key] = self._whole(weight, key, value).copy_(value)

    def has(self, weight: Weight, key: str) -> bool:
        """Return whether a tensor of a weight is stored here."""
        return key in self._wholes[weight.name]

    def whole(self, weight: Weight, key: str) -> torch.Tensor:
        """Return a weight's offloaded tensor itself, not a copy."""
        self.load()
        return self._wholes[weight.name][key]

    def _whole(self, weight: Weight, key: str, model: torch.Tensor) -> torch.Tensor:
        """Return the place of a weight's state under `key`, made like `model` if it is new or has changed."""
        wholes = self._wholes[weight.name]
        known = wholes.get(key)
        if known is None or known.shape != model.shape or known.dtype != model.dtype:
            lent = None if self._lent is None else self._lent.empty_like(model)
            empty_like = self._buffer.alone_like if self._is_for_masters and key != MASTER else self._buffer.empty_like
            wholes[key] = empty_like(model) if lent is None else lent
        return wholes[key]


NewStore = Callable[[CopyStreams], StateStore]
"""Function that makes a group's store, given the streams that copy to and from it."""


def _small_place(value: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    """Return host memory for a tensor of a few bytes. If it is pinned, torch keeps it until its copies have ended."""
    with claimed_at_birth("state", "host"):
        place = torch.empty_like(value, device="cpu", pin_memory=is_pinned)
    claim(place, "state", "host")
    return place


def _has_extent(key: str, value: Any) -> bool:
    # A master counts even if its weight has no dimensions.
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or key == MASTER)


def _part(whole: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
    if key in _OF_BLOCKS and not one.is_whole:
        return whole[one.start // CUT_MULTIPLE : -(-one.stop // CUT_MULTIPLE)]
    return whole if key in _TABLES else one.part_of(whole)


def _like_whole(value: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
    """Return a tensor without memory in the form of a weight's state, given that of one slice."""
    if one.is_whole or key in _TABLES:
        return value
    if key in _OF_BLOCKS:
        return value.new_empty(-(-one.weight.parameter.numel() // CUT_MULTIPLE), device="meta")
    if value.numel() != one.stop - one.start:
        raise ValueError(
            f"the state {key!r} of {one.weight.name} has {value.numel()} elements for {one.stop - one.start} of the "
            "weight, so the base optimizer is not element-wise. Set elementwise=False"
        )
    return value.new_empty(one.weight.parameter.shape, device="meta")
