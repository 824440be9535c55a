"""Where a group's masters and optimizer state wait for their turn: pinned host memory; files through `disk.FileBuffer`.

What waits is flat: a value with tensors inside is a `Structure` under its key, its tensors have keys of their own.
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
"""The gaps between a weight's tensors."""

_WHOLE = -1
"""In place of a slice's start: the scalars restored for the whole weight."""

# bitsandbytes' 8-bit state: one scale a block of CUT_MULTIPLE elements, and the code book.
_OF_BLOCKS = ("absmax1", "absmax2")
_TABLES = ("qmap1", "qmap2")


Name = tuple[str, str]
"""Of a stored tensor: its weight's, and its key."""
Copy = tuple[str, torch.Tensor, torch.Tensor]
"""A key of a slice's state, its tensor on the device, and where that is to wait."""


def _small_copy(value: torch.Tensor) -> torch.Tensor:
    """Queue the copy of a tensor of a few bytes to host memory, on the computing stream.

    torch's own pinned allocator keeps the memory until the device is done with it.
    """
    with claimed_at_birth("state", "host"):
        copy = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    claim(copy, "state", "host")
    return copy.copy_(value.detach(), non_blocking=True)


class OffloadBuffer:
    """Owns one group's waiting tensors.

    Args:
        tier: Where its bytes count in the ledger.
        allocate: Makes a uint8 buffer of so many bytes, or raises.
    """

    def __init__(self, tier: MemoryTier, allocate: Callable[[int], torch.Tensor]) -> None:
        self._tier = tier
        self._allocate = allocate
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._used_bytes: dict[torch.dtype, int] = {}

    def reserve(self, num_bytes: Mapping[torch.dtype, int]) -> None:
        """Allocate ahead for the tensors to come, so that a lack of memory shows now.

        One buffer a dtype: torch.save refuses tensors of several dtypes in one storage.
        """
        with claimed_at_birth("state", self._tier):
            buffers = {dtype: self._allocate(size) for dtype, size in num_bytes.items() if size}
        for dtype, buffer in buffers.items():
            claim(buffer, "state", self._tier)
            self._buffers[dtype], self._used_bytes[dtype] = buffer, 0

    def empty_like(self, model: torch.Tensor) -> torch.Tensor:
        """A tensor with arbitrary content, from the reserved buffer while it lasts, else from a new one."""
        dtype = model.dtype
        if dtype not in self._buffers or self._used_bytes[dtype] + model.nbytes > self._buffers[dtype].numel():
            self.reserve({dtype: aligned(max(1, model.numel()) * dtype.itemsize)})
        start = self._used_bytes[dtype]
        self._used_bytes[dtype] += aligned(model.nbytes)
        return tensor_at(self._buffers[dtype], start, model)

    is_resident: ClassVar[bool] = True
    """Whether the tensors always lie in host memory, so that there is nothing to load."""

    @property
    def is_loaded(self) -> bool:
        """Whether the tensors lie in host memory now, so that `load` does not wait."""
        return True

    def load(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Wait until the tensors lie in host memory.

        Returns:
            Given a tensor where it was before, returns it where it is now; None if all are where they were.

        Raises:
            OSError: If they can't be read.
        """
        return None

    def lasting(self, tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Return tensors that can be read after other groups' were loaded, given those in host memory.

        Raises:
            OSError: If they can't be written.
        """
        return dict(tensors)


NewBuffer = Callable[[CopyStreams], OffloadBuffer]
"""Makes the owner of a group's tensors, given the streams that copy to and from them."""


def host_buffer(streams: CopyStreams) -> OffloadBuffer:
    """A buffer in host memory that these streams copy to and from."""
    return OffloadBuffer("host", streams.host_memory)


def mapped_buffer(directory: Path) -> OffloadBuffer:
    """A buffer in memory-mapped files under `directory`; copies from it wait for the disk.

    Files are allocated whole (a full disk is an error, never a SIGBUS) and unlinked as soon as they are mapped, so
    that nothing stays behind, however the process ends.
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
            f"({os.strerror(error.errno or 0)}); free space there, name another state_dir, or use state='host'",
        ) from error
    finally:
        os.close(handle)
        Path(name).unlink()


def waiting_bytes(weights: Sequence[Weight], meter: StepMeter) -> Counter[torch.dtype]:
    """Bytes of one group's masters and state that will wait between its steps, by dtype.

    Without `state="disk"`, whose files are allocated whole, state is left out where counting it would take an extra
    step on a dummy weight.

    Args:
        weights: What the group trains.
        meter: Knows what its steps need, and HiFT's settings.
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
    """What waits of one group.

    Args:
        buffer: Where tensors with dimensions wait.
    """

    def __init__(self, buffer: OffloadBuffer) -> None:
        self.buffer = buffer
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._scalars: dict[tuple[str, int], dict[str, Any]] = {}
        self._received: dict[tuple[str, int], frozenset[str]] = {}
        """Keys of the tensors that each slice has left here; a weight's other slices may have none yet."""
        self._parts: dict[tuple[str, int, int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """By weight, slice and key: a waiting tensor, and the slice's part of it, which is asked for often."""

    def tensors_of(self, one: Slice) -> dict[str, torch.Tensor]:
        """A slice's parts of the waiting tensors, by key."""
        self.load()
        name = one.weight.name
        keys = self._received.get((name, one.start), self._received.get((name, _WHOLE), frozenset()))
        return {key: self._part(whole, one, key) for key, whole in self._tensors.get(name, {}).items() if key in keys}

    def scalars_of(self, one: Slice) -> dict[str, Any]:
        """Copies of a slice's state without dimensions, each where it lies in a step."""
        name = one.weight.name
        scalars = self._scalars.get((name, one.start))
        if scalars is None:  # restored: every slice starts from the weight's
            scalars = self._scalars.get((name, _WHOLE), {})
        device = one.weight.parameter.device
        return {
            key: value.to(device if key in one.scalars_on_device else "cpu", non_blocking=True, copy=True)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in scalars.items()
        }

    def receive(self, one: Slice, state: WeightState) -> list[Copy]:
        """Take a slice's state after its step; tensors are to be copied by the caller, behind the computing stream.

        Those without dimensions are on the host no sooner than the caller's copies are.

        Args:
            one: The slice.
            state: By key; its master under `MASTER`.

        Returns:
            The copies to make.
        """
        self.load()
        state = flatten_state(state)
        known = self._tensors.get(one.weight.name, {})
        tensors = self._keep_scalars(one.weight, one.start, state)
        copies = []
        for key, value in tensors.items():
            if not (key in _TABLES and key in known):  # it never changes, and the next piece may be loading it
                copies.append((key, value, self._place_of(one, key, value)))
        empty_objects(state)
        return copies

    def waiting_tensors(self) -> dict[Name, torch.Tensor]:
        """All tensors that wait, by weight and key; not those of keys that no slice has left here any more."""
        kept = {(name, key) for (name, _), keys in self._received.items() for key in keys}
        return {
            (name, key): tensor
            for name, tensors in self._tensors.items()
            for key, tensor in tensors.items()
            if (name, key) in kept
        }

    def load(self) -> None:
        """Wait until all tensors lie in host memory; each use of them does so."""
        moved = None if self.buffer.is_resident else self.buffer.load()
        if moved is not None:
            self._parts = {}
            for tensors in self._tensors.values():
                tensors.update({key: moved(tensor) for key, tensor in tensors.items()})

    def export(self, weights: Sequence[Weight], *, lasts: bool = True) -> dict[str, WeightState]:
        """The state of a group's weights: masters follow what others have written.

        Args:
            weights: What the group trains.
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
            # What was restored for the whole weight is out of date once its slices were stepped.
            slices = [start for start in starts if start != _WHOLE] or starts
            scalars = dict(self._scalars[weight.name, slices[0]]) if slices else {}
            if tensors or scalars:
                exported[weight.name] = unflatten_state({**tensors, **scalars}, copy_objects=True)
        return exported

    def restore(self, weights: Sequence[Weight], state: Mapping[str, WeightState]) -> None:
        """Take copies of what `export` returned."""
        self.load()
        arriving: dict[str, WeightState] = {}
        num_bytes: Counter[torch.dtype] = Counter()
        for weight in weights:
            values = flatten_state(state.get(weight.name, {}), copy_objects=True)
            # Nobody waits for copies that are queued here.
            values = {
                key: value.cpu() if isinstance(value, torch.Tensor) and not value.dim() else value
                for key, value in values.items()
            }
            arriving[weight.name] = self._keep_scalars(weight, _WHOLE, values)
            for value in arriving[weight.name].values():
                num_bytes[value.dtype] += aligned(value.nbytes)
        self.buffer.reserve(num_bytes)
        for weight in weights:
            for key, value in arriving[weight.name].items():
                self._whole(weight, key, value).copy_(value)

    def place(self, weight: Weight, key: str, value: torch.Tensor) -> None:
        """Let a tensor of a weight's shape wait before any step has left its state here.

        Args:
            weight: The weight.
            key: Of its state.
            value: On the host; copied.
        """
        self.load()
        place = (weight.name, _WHOLE)
        self._received[place] = self._received.get(place, frozenset()) | {key}
        self._whole(weight, key, value).copy_(value)

    def has(self, weight: Weight, key: str) -> bool:
        """Whether a tensor of a weight waits here."""
        return key in self._tensors.get(weight.name, {})

    def whole(self, weight: Weight, key: str) -> torch.Tensor:
        """A weight's waiting tensor, the living one."""
        self.load()
        return self._tensors[weight.name][key]

    def _keep_scalars(self, weight: Weight, start: int, state: WeightState) -> dict[str, torch.Tensor]:
        """Keep what has no dimensions of a slice's state, and the keys of the others, which are returned."""
        tensors = {key: value for key, value in state.items() if _has_extent(key, value)}
        self._received[weight.name, start] = frozenset(tensors)
        self._scalars[weight.name, start] = {
            key: _small_copy(value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
            if key not in tensors
        }
        return tensors

    def _place_of(self, one: Slice, key: str, value: torch.Tensor) -> torch.Tensor:
        """Where a slice's part of the state under `key` waits: where it did before, if it is of that form."""
        whole = self._tensors.get(one.weight.name, {}).get(key)
        if whole is not None:
            part = self._part(whole, one, key)
            if part.shape == value.shape and part.dtype == value.dtype:
                return part
        return self._part(self._whole(one.weight, key, _like_whole(value, one, key)), one, key)

    def _part(self, whole: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
        """A slice's part of a waiting tensor."""
        place = (one.weight.name, one.start, one.stop, key)
        known = self._parts.get(place)
        if known is None or known[0] is not whole:
            known = self._parts[place] = (whole, _part(whole, one, key))
        return known[1]

    def _whole(self, weight: Weight, key: str, model: torch.Tensor) -> torch.Tensor:
        """Where all of a weight's state under `key` waits; made like `model` if it is new or has changed."""
        tensors = self._tensors.setdefault(weight.name, {})
        known = tensors.get(key)
        if known is None or known.shape != model.shape or known.dtype != model.dtype:
            tensors[key] = self.buffer.empty_like(model)
        return tensors[key]


def _has_extent(key: str, value: Any) -> bool:
    # A master counts even of a weight without dimensions.
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or key == MASTER)


def _part(whole: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
    if key in _OF_BLOCKS and not one.is_whole:
        return whole[one.start // CUT_MULTIPLE : -(-one.stop // CUT_MULTIPLE)]
    return whole if key in _TABLES else one.part_of(whole)


def _like_whole(value: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
    """A tensor without memory in the form of a weight's state, given that of one slice."""
    if one.is_whole or key in _TABLES:
        return value
    if key in _OF_BLOCKS:
        return value.new_empty(-(-one.weight.parameter.numel() // CUT_MULTIPLE), device="meta")
    if value.numel() != one.stop - one.start:
        raise ValueError(
            f"the state {key!r} of {one.weight.name} has {value.numel()} elements for {one.stop - one.start} of the "
            "weight, so the base optimizer is not element-wise; set elementwise=False"
        )
    return value.new_empty(one.weight.parameter.shape, device="meta")
