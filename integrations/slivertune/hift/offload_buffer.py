"""Storage of a group's masters and optimizer state between turns: pinned host memory, or files by `disk.FileBuffer`.

Offloaded state is flat: a value with nested tensors is a `Structure` under its key, and its tensors have own keys.
"""

import errno
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from slivertune.core.copy_streams import CopyStreams
from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.core.ledger import MemoryTier, claim, claimed_at_birth
from slivertune.hift.base import CUT_MULTIPLE
from slivertune.hift.masters import refresh_master
from slivertune.hift.nested_state import empty_objects, flatten_state, unflatten_state
from slivertune.hift.piece import Slice, Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import MASTER, WeightState

_GAPS_BYTES = 512
"""Bytes of gaps between a weight's tensors."""

_WHOLE = -1
"""Start of a slice that stands for the whole weight, whose scalars were restored."""

# bitsandbytes' 8-bit state: one scale per block of CUT_MULTIPLE elements, and the code book.
_OF_BLOCKS = ("absmax1", "absmax2")
_TABLES = ("qmap1", "qmap2")


Name = tuple[str, str]
"""Name of a weight, and key of its stored tensor."""
Copy = tuple[str, torch.Tensor, torch.Tensor]
"""Key of a slice's state, its tensor on the device, and its place on the host."""


def _small_place(value: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    """Return host memory for a tensor of a few bytes. If it is pinned, torch keeps it until its copies have ended."""
    with claimed_at_birth("state", "host"):
        place = torch.empty_like(value, device="cpu", pin_memory=is_pinned)
    claim(place, "state", "host")
    return place


class OffloadBuffer:
    """Owner of one group's offloaded tensors.

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
        with claimed_at_birth("state", self._tier):
            buffers = {dtype: self._allocate(size) for dtype, size in num_bytes.items() if size}
        for dtype, buffer in buffers.items():
            claim(buffer, "state", self._tier)
            self._buffers[dtype], self._used_bytes[dtype] = buffer, 0

    def empty_like(self, model: torch.Tensor) -> torch.Tensor:
        """Return a tensor with arbitrary content, from the reserved buffer while it lasts, else from a new one."""
        dtype = model.dtype
        if dtype not in self._buffers or self._used_bytes[dtype] + model.nbytes > self._buffers[dtype].numel():
            self.reserve({dtype: aligned(max(1, model.numel()) * dtype.itemsize)})
        start = self._used_bytes[dtype]
        self._used_bytes[dtype] += aligned(model.nbytes)
        return tensor_at(self._buffers[dtype], start, model)

    is_resident: ClassVar[bool] = True
    """Whether the tensors are always in host memory, so that there is nothing to load."""

    @property
    def is_loaded(self) -> bool:
        """Whether the tensors are in host memory now, so that `load` does not wait."""
        return True

    def load(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Wait until the tensors are in host memory.

        Returns:
            Function from a tensor at its old place to the same tensor at its new place; None if none has moved.

        Raises:
            OSError: If they can't be read.
        """
        return None

    def lasting(self, tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Return tensors that stay readable when other groups' are loaded, given those in host memory.

        Raises:
            OSError: If they can't be written.
        """
        return dict(tensors)


NewBuffer = Callable[[CopyStreams], OffloadBuffer]
"""Function that makes the owner of a group's tensors, given the streams that copy to and from them."""


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


def waiting_bytes(weights: Sequence[Weight], meter: StepMeter) -> Counter[torch.dtype]:
    """Count the bytes of one group's masters and state that will be offloaded between its steps, by dtype.

    Without `state="disk"`, whose files are allocated whole, state is left out if counting it would take an extra step
    on a dummy weight.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the memory that steps need, with HiFT's settings.
    """
    num_bytes: Counter[torch.dtype] = Counter()
    for weight in weights:
        if meter.steps_master(weight):
            num_bytes[torch.float32] += aligned(weight.parameter.numel() * torch.float32.itemsize)
        if meter.is_elementwise or meter.config.state == "disk":
            for dtype, state_bytes in meter.needs(weight).state_bytes.items():
                num_bytes[dtype] += aligned(math.ceil(state_bytes)) + _GAPS_BYTES
    return num_bytes


class OffloadedState:
    """Offloaded state of one group.

    Args:
        buffer: Storage of tensors with dimensions.
    """

    def __init__(self, buffer: OffloadBuffer) -> None:
        self.buffer = buffer
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._scalars: dict[tuple[str, int], dict[str, Any]] = {}
        self._received: dict[tuple[str, int], frozenset[str]] = {}
        """Keys of the tensors that each slice has left here. A weight's other slices may have none yet."""
        self._parts: dict[tuple[str, int, int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """By weight, slice and key: an offloaded tensor, and the slice's part of it, which is read often."""

    def tensors_of(self, one: Slice) -> dict[str, torch.Tensor]:
        """Return what a slice's step needs on the device, by key: parts of the offloaded tensors, and scalars."""
        self.load()
        name = one.weight.name
        keys = self._received.get((name, one.start), self._received.get((name, _WHOLE), frozenset()))
        parts = {key: self._part(whole, one, key) for key, whole in self._tensors.get(name, {}).items() if key in keys}
        return {
            **parts,
            **{key: value for key, value in self._scalars_of(one).items() if _is_on_device(one, key, value)},
        }

    def host_values_of(self, one: Slice) -> dict[str, Any]:
        """Copy the values without dimensions that a slice's step needs on the host."""
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self._scalars_of(one).items()
            if not _is_on_device(one, key, value)
        }

    def _scalars_of(self, one: Slice) -> dict[str, Any]:
        scalars = self._scalars.get((one.weight.name, one.start))
        # Restored: every slice starts from the weight's.
        return self._scalars.get((one.weight.name, _WHOLE), {}) if scalars is None else scalars

    def receive(self, one: Slice, state: WeightState) -> list[Copy]:
        """Take a slice's state after its step. The caller copies what is on the device, behind the computing stream.

        Args:
            one: Stepped slice.
            state: State by key, with the master under `MASTER`.

        Returns:
            Copies to make.
        """
        self.load()
        state = flatten_state(state)
        known = self._tensors.get(one.weight.name, {})
        copies = [
            (key, value, self._place_of(one, key, value))
            for key, value in state.items()
            # A table never changes, and the next chunk may be loading it.
            if _has_extent(key, value) and not (key in _TABLES and key in known)
        ]
        copies += self._keep_scalars(one.weight, one.start, state)
        empty_objects(state)
        return copies

    def waiting_tensors(self) -> dict[Name, torch.Tensor]:
        """Return all offloaded tensors by weight and key, without keys that no slice leaves here any more."""
        kept = {(name, key) for (name, _), keys in self._received.items() for key in keys}
        return {
            (name, key): tensor
            for name, tensors in self._tensors.items()
            for key, tensor in tensors.items()
            if (name, key) in kept
        }

    def load(self) -> None:
        """Wait until all tensors are in host memory. Each use of them does so."""
        moved = None if self.buffer.is_resident else self.buffer.load()
        if moved is not None:
            self._parts = {}
            for tensors in self._tensors.values():
                tensors.update({key: moved(tensor) for key, tensor in tensors.items()})

    def export(self, weights: Sequence[Weight], *, lasts: bool = True) -> dict[str, WeightState]:
        """Return the state of a group's weights, after masters have followed writes of others.

        Args:
            weights: Trained weights of the group.
            lasts: Whether the tensors are read after other groups' were loaded.
        """
        self.load()
        exported: dict[str, WeightState] = {}
        waiting = self.waiting_tensors()
        for weight in weights:
            if (weight.name, MASTER) in waiting and not weight.is_waiting:
                master = waiting[weight.name, MASTER]
                refresh_master(master, weight.parameter.detach().to(master.device))
        if lasts:
            waiting = self.buffer.lasting(waiting)
        for weight in weights:
            tensors: WeightState = {key: value for (name, key), value in waiting.items() if name == weight.name}
            starts = sorted(start for name, start in self._scalars if name == weight.name)
            # Scalars restored for the whole weight are out of date once its slices were stepped.
            slices = [start for start in starts if start != _WHOLE] or starts
            scalars = dict(self._scalars[weight.name, slices[0]]) if slices else {}
            if tensors or scalars:
                exported[weight.name] = unflatten_state({**tensors, **scalars}, copy_objects=True)
        return exported

    def restore(self, weights: Sequence[Weight], state: Mapping[str, WeightState]) -> None:
        """Copy the state that `export` returned into this storage."""
        self.load()
        arriving: dict[str, WeightState] = {}
        num_bytes: Counter[torch.dtype] = Counter()
        for weight in weights:
            values = flatten_state(state.get(weight.name, {}), copy_objects=True)
            # Nobody would wait for copies that are queued here.
            values = {
                key: value.cpu() if isinstance(value, torch.Tensor) and not value.dim() else value
                for key, value in values.items()
            }
            self._keep_scalars(weight, _WHOLE, values)
            arriving[weight.name] = {key: value for key, value in values.items() if _has_extent(key, value)}
            for value in arriving[weight.name].values():
                num_bytes[value.dtype] += aligned(value.nbytes)
        self.buffer.reserve(num_bytes)
        for weight in weights:
            for key, value in arriving[weight.name].items():
                self._whole(weight, key, value).copy_(value)

    def place(self, weight: Weight, key: str, value: torch.Tensor) -> None:
        """Store a tensor of a weight's shape before any step has left its state here.

        Args:
            weight: Weight that it belongs to.
            key: Key in the weight's state.
            value: Values on the host; copied.
        """
        self.load()
        place = (weight.name, _WHOLE)
        self._received[place] = self._received.get(place, frozenset()) | {key}
        self._whole(weight, key, value).copy_(value)

    def has(self, weight: Weight, key: str) -> bool:
        """Return whether a tensor of a weight is stored here."""
        return key in self._tensors.get(weight.name, {})

    def whole(self, weight: Weight, key: str) -> torch.Tensor:
        """Return a weight's offloaded tensor itself, not a copy."""
        self.load()
        return self._tensors[weight.name][key]

    def _keep_scalars(self, weight: Weight, start: int, state: WeightState) -> list[Copy]:
        """Keep the values without dimensions of a slice's state, and note the keys of the others.

        Returns:
            Copies of those values that are on the device.
        """
        scalars, copies = {key: value for key, value in state.items() if not _has_extent(key, value)}, []
        for key, value in scalars.items():
            if not isinstance(value, torch.Tensor):
                continue
            # A step on a GPU loads what was restored from here.
            is_pinned = value.is_cuda or (start == _WHOLE and weight.device.type == "cuda")
            scalars[key] = place = _small_place(value, is_pinned=is_pinned)
            if value.device.type == "cpu":
                place.copy_(value.detach())
            else:
                copies.append((key, value, place))
        self._received[weight.name, start] = frozenset(state.keys() - scalars.keys())
        self._scalars[weight.name, start] = scalars
        return copies

    def _place_of(self, one: Slice, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return the place of a slice's part of the state under `key`: the old one if it has the same form."""
        whole = self._tensors.get(one.weight.name, {}).get(key)
        if whole is not None:
            part = self._part(whole, one, key)
            if part.shape == value.shape and part.dtype == value.dtype:
                return part
        return self._part(self._whole(one.weight, key, _like_whole(value, one, key)), one, key)

    def _part(self, whole: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
        """Return a slice's part of an offloaded tensor."""
        place = (one.weight.name, one.start, one.stop, key)
        known = self._parts.get(place)
        if known is None or known[0] is not whole:
            known = self._parts[place] = (whole, _part(whole, one, key))
        return known[1]

    def _whole(self, weight: Weight, key: str, model: torch.Tensor) -> torch.Tensor:
        """Return the place of a weight's state under `key`, made like `model` if it is new or has changed."""
        tensors = self._tensors.setdefault(weight.name, {})
        known = tensors.get(key)
        if known is None or known.shape != model.shape or known.dtype != model.dtype:
            tensors[key] = self.buffer.empty_like(model)
        return tensors[key]


def _has_extent(key: str, value: Any) -> bool:
    # A master counts even if its weight has no dimensions.
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or key == MASTER)


def _is_on_device(one: Slice, key: str, value: Any) -> bool:
    """Return whether a step needs a value without dimensions on the device."""
    return key in one.scalars_on_device and isinstance(value, torch.Tensor)


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
