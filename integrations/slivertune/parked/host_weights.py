"""Offloaded weights of blocks, and the device slots that they pass through.

A parameter's `data` is always the place to read and write its values: the offloaded copy or, after `bring`, a view of
a slot. A slot is written again when all queued reads of it are done, and keeps its content until then: a block that is
needed again soon is still there (until `forget`).

    inbound:            load 3 | load 5 ...          a load waits for reads of its slot, computing for the load
    computing:  block 1, 2, 3   | 4, 5 ...
    outbound:   blocks trained in the previous turn

Blocks that train stay in their slots through the whole turn, and are trained there. They are written back when the next
forward begins: until then others may write to them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch

from slivertune.core.copy_streams import CopyStreams, Event, copy_streams
from slivertune.core.host_tensors import aligned, claimed_host_memory, tensor_at
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.torch_internals import storage_key, version_of

NUM_WORKING_SLOTS = 2
"""Slots beside those of blocks that train: one is read while the other is loaded."""


class Movable(Protocol):
    """A parameter, or its codes."""

    data: torch.Tensor
    """Values, on the host or the device."""


@dataclass(slots=True, eq=False)
class OffloadedBlock:
    """A block whose weights are offloaded to the host."""

    name: str
    weights: tuple[Movable, ...]
    on_host: tuple[torch.Tensor, ...] = ()
    """Values of the weights in host memory, each in its own, empty if the block is resident."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot that the block fits in."""
        return sum(aligned(weight.data.nbytes) for weight in self.weights)


@dataclass(slots=True, eq=False)
class _WeightSlot:
    memory: torch.Tensor
    free_after: Event
    """Event after which the memory may be written."""
    block: int | None = None
    """Block whose weights are there, or in flight."""
    views: list[torch.Tensor] = field(default_factory=list)
    ready: Event = None
    """Event after which the weights are there."""


class HostWeights:
    """Loads the weights of blocks to the device, and writes back the trained ones.

    Args:
        blocks: Blocks to move to the host. Each is requested when the one before it has been moved.
        device: Device on which the model computes.
        num_trained: Largest number of blocks that train together.
        resident: Indices of blocks that stay on the device.

    Raises:
        RuntimeError: If host memory can't be pinned.
    """

    def __init__(
        self,
        blocks: Iterable[OffloadedBlock],
        device: torch.device,
        *,
        num_trained: int,
        resident: Collection[int] = (),
    ) -> None:
        self.device = device
        self.streams: CopyStreams = copy_streams(device)
        """Streams that load weights and write them back."""
        self._blocks: list[OffloadedBlock] = []
        self._num_slots = NUM_WORKING_SLOTS + num_trained
        self._resident: frozenset[int] = frozenset()
        self._slots: list[_WeightSlot] = []
        self._brought: dict[int, _WeightSlot] = {}
        self._kept: frozenset[int] = frozenset()
        self._trained: dict[int, _WeightSlot] = {}
        """Slots of blocks that trained in ended turns, whose copies on the host are older."""
        self._arrives: dict[int, Event] = {}
        """Events by block, after which a write back in flight is complete."""
        self._coming: list[int] = []
        self._num_taken_over = Counter[int]()
        """Times that others have replaced a weight's data, by the weight's `id`."""
        for index, block in enumerate(blocks):
            self._blocks.append(block)
            if index not in resident:
                self._move_to_host(block)
        self._slot_bytes = max(self.block_bytes)
        self.stay(resident)

    @property
    def streamed(self) -> list[int]:
        """Indices of the offloaded blocks, in order."""
        return [index for index in range(len(self._blocks)) if index not in self._resident]

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a slot that each block fits in, in order."""
        return [block.num_bytes for block in self._blocks]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of host memory that hold offloaded weights."""
        return sum(each.nbytes for block in self._blocks for each in block.on_host)

    def stay(self, indices: Collection[int]) -> None:
        """Make these blocks resident and offload all others, between steps.

        Args:
            indices: Indices of the blocks.
        """
        if self._resident != frozenset(indices):
            self.take_all_back()
        for index, block in enumerate(self._blocks):
            if index in indices and index not in self._resident:
                self._move_to_device(block)
            elif index in self._resident and index not in indices:
                self._move_to_host(block)
        self._resident = frozenset(indices)

    def expect(self, coming: Sequence[int]) -> None:
        """Announce which blocks are needed next, and begin to load them.

        Args:
            coming: Indices in the order of use.
        """
        self._coming = [index for index in coming if index not in self._resident]
        self._load_ahead()

    def bring(self, index: int) -> None:
        """Point a block's parameters to the device until `put_back`, and prefetch the blocks after it."""
        if index in self._resident:
            return
        if index in self._coming:
            del self._coming[: self._coming.index(index) + 1]
        if index not in self._brought:
            slot = self._slot_of(index) or self._load(index, self._take(index))
            self.streams.compute_after(slot.ready)
            self._place(index, slot.views)
            self._brought[index] = slot
        self._load_ahead()

    def put_back(self, index: int) -> None:
        """Point a block's parameters to the host again, unless they are kept. Queued work still finds its slot."""
        if index not in self._brought or index in self._kept:
            return
        slot = self._brought.pop(index)
        if index in self._trained:
            return
        self._place(index, self._blocks[index].on_host)
        # After its write back, too.
        self.streams.compute_after(self._arrives.get(index))
        slot.free_after = self.streams.record()
        self._load_ahead()

    def put_all_back(self, but: int | None = None) -> None:
        """Put back all blocks but one and the kept ones, and free surplus slots."""
        for index in [each for each in self._brought if each != but]:
            self.put_back(index)
        while len(self._slots) > self._num_slots and (free := self._free_slots()):
            # Its memory is the computation's next.
            self.streams.compute_after(free[0].ready)
            self.streams.compute_after(free[0].free_after)
            self._slots.remove(free[0])

    def keep(self, indices: Collection[int]) -> None:
        """Begin a turn, in which these blocks train and stay on the device once they are loaded.

        Args:
            indices: Indices of the blocks. The turn of all other blocks has ended.
        """
        for index in self._kept.difference(indices):
            slot = self._brought.pop(index, None)
            if slot is not None:
                self._trained[index] = slot
        self._kept = frozenset(indices)
        for index in self._kept & self._trained.keys():
            self._brought[index] = self._trained.pop(index)

    def begin_writing(self, index: int) -> None:
        """Point a block to memory where writes last: its slot if it trains there, else the host."""
        self.put_back(index)
        for slot in self._free_slots():
            if slot.block == index:
                self._empty(slot)

    def take_over(self) -> bool:
        """Take the values of parameters whose data was replaced, as by a move of the model, between steps.

        Returns:
            Whether all of them still have their shape and dtype. Nothing is taken otherwise.
        """
        offloaded = (block for block in self._blocks if block.on_host)
        pairs = (pair for block in offloaded for pair in zip(block.weights, block.on_host, strict=True))
        if not all(_has_form_of(weight.data, own) for weight, own in pairs):
            return False
        for index, block in enumerate(self._blocks):
            if index in self._resident:
                for weight in block.weights:
                    weight.data = weight.data.to(self.device)
            else:
                self.take_over_block(index)
        return True

    def take_over_block(self, index: int) -> None:
        """Take the values of a block's parameters whose data was replaced.

        Raises:
            RuntimeError: If one has another shape or dtype.
        """
        block = self._blocks[index]
        slot = self._brought.get(index) or self._trained.get(index)
        values = block.on_host if slot is None else slot.views
        for weight, own in zip(block.weights, values, strict=bool(values)):
            if weight.data.data_ptr() == own.data_ptr():
                continue
            if not _has_form_of(weight.data, own):
                raise RuntimeError(
                    f"a weight of {block.name} was replaced by one of shape {tuple(weight.data.shape)} in "
                    f"{weight.data.dtype}, while it is loaded from the host as {tuple(own.shape)} in {own.dtype}. "
                    "Call HiFT's detach(), or the parked layers' remove(), first"
                )
            own.copy_(weight.data)
            weight.data = own
            self._num_taken_over[id(weight)] += 1

    def forget(self) -> None:
        """Empty the slots of blocks that do not train: others may have written to the host's copy since the load."""
        for slot in self._slots:
            is_own = slot in self._brought.values() or slot in self._trained.values()
            if not is_own:
                self._empty(slot)

    def send_back(self) -> None:
        """Begin to write back the blocks of ended turns. Nobody may read them before `settle`."""
        for index, slot in self._trained.items():
            with self.streams.on("outbound", self.streams.record()):
                for source, target in zip(slot.views, self._blocks[index].on_host, strict=True):
                    target.copy_(source, non_blocking=True)
                self._arrives[index] = slot.free_after = self.streams.record("outbound")
            self._place(index, self._blocks[index].on_host)
        self._trained = {}

    def settle(self) -> None:
        """Wait on the host for write backs in flight."""
        for event in self._arrives.values():
            self.streams.wait_on_host(event)
        self._arrives = {}

    def take_all_back(self) -> None:
        """Offload all parameters, and free their memory on the device."""
        self._coming = []
        self.recover_all()
        kept = self._kept
        self.keep(())
        self.put_all_back()
        self.send_back()
        # Loads, too: the stream that computes now need not be the one that gets their memory.
        self.streams.synchronize()
        self._arrives = {}
        self._slots.clear()
        self._kept = kept

    def recover(self, index: int) -> dict[int, torch.Tensor]:
        """Put back a block of a forward or backward that was broken off, with what others may have written to it since.

        Returns:
            Values in host memory by the weight's `id`; empty for other blocks.
        """
        if index not in self._brought or index in self._kept:
            return {}
        self.take_over_block(index)
        self._copy_to_host(index, self._brought[index])
        self.put_back(index)
        return {id(weight): weight.data for weight in self._blocks[index].weights}

    def recover_all(self) -> None:
        """Put back the blocks of a forward or backward that was broken off."""
        for index in list(self._brought):
            self.recover(index)
        self.put_all_back()

    def copy_to_host(self, index: int) -> dict[int, torch.Tensor]:
        """Copy the current values of a block that trains or has trained to the host.

        Returns:
            Values in host memory by the weight's `id`, each in a storage of its own; empty for other blocks.
        """
        slot = self._trained.get(index) or (self._brought.get(index) if index in self._kept else None)
        if slot is None:
            return {}
        self._copy_to_host(index, slot)
        block = self._blocks[index]
        return {id(weight): target for weight, target in zip(block.weights, block.on_host, strict=True)}

    def _copy_to_host(self, index: int, slot: _WeightSlot) -> None:
        for source, target in zip(slot.views, self._blocks[index].on_host, strict=True):
            target.copy_(source)

    def place_in_slot(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the block whose slot a tensor is a view of and its first byte there, or None for other tensors."""
        if tensor.layout != torch.strided:
            return None
        key = storage_key(tensor.untyped_storage())
        for index, slot in self._brought.items():
            if storage_key(slot.memory.untyped_storage()) == key:
                return index, int(tensor.storage_offset()) * tensor.itemsize
        return None

    def version_at(self, index: int, start: int) -> int:
        """Return the number of times that others have written to a block's weight, which lies at a byte of its slot."""
        weight = self._weight_at(index, start)[0]
        written = version_of(weight) if isinstance(weight, torch.Tensor) else 0
        return written + self._num_taken_over[id(weight)]

    def memory_from(self, index: int, start: int, *, loads: bool) -> torch.Tensor:
        """Return the memory of a block's weight from a byte of its slot on.

        Args:
            index: Index of the block.
            start: First byte in the block's slot.
            loads: Whether the block may be loaded into a slot. Otherwise the weight alone is copied to the device.

        Returns:
            uint8, one dimension, on the device.
        """
        if loads:
            self.bring(index)
            if index in self._brought:
                return self._brought[index].memory[start:]
        weight, first = self._weight_at(index, start)
        data = weight.data.to(self.device)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        flat.set_(data.untyped_storage(), data.storage_offset() * data.itemsize, (data.nbytes,))  # type: ignore[call-overload]
        return flat[start - first :]

    def _weight_at(self, index: int, start: int) -> tuple[Movable, int]:
        """Return the weight that has a byte of a block's slot, and its first byte there."""
        starts = accumulate((aligned(weight.data.nbytes) for weight in self._blocks[index].weights), initial=0)
        return [each for each in zip(self._blocks[index].weights, starts, strict=False) if each[1] <= start][-1]

    def _move_to_host(self, block: OffloadedBlock) -> None:
        offloaded = []
        for weight in block.weights:
            memory = claimed_host_memory(self.streams, weight.data.nbytes, "parameters")
            offloaded.append(tensor_at(memory, 0, weight.data).copy_(weight.data))
            weight.data = offloaded[-1]
        block.on_host = tuple(offloaded)

    def _move_to_device(self, block: OffloadedBlock) -> None:
        for weight in block.weights:
            with claimed_at_birth("parameters"):
                weight.data = torch.empty_like(weight.data, device=self.device).copy_(weight.data)
            claim(weight.data, "parameters")
        block.on_host = ()

    def _place(self, index: int, data: Sequence[torch.Tensor]) -> None:
        for weight, values in zip(self._blocks[index].weights, data, strict=True):
            weight.data = values

    def _slot_of(self, index: int) -> _WeightSlot | None:
        return next((slot for slot in self._slots if slot.block == index), None)

    def _load_ahead(self) -> None:
        for index in self._coming[: self._num_slots]:
            if self._slot_of(index) is None:
                slot = self._take(index, ahead=True)
                if slot is None:
                    return
                self._load(index, slot)

    def _load(self, index: int, slot: _WeightSlot | None) -> _WeightSlot:
        assert slot is not None, "a block that is needed always finds a slot"
        slot.block, slot.views, start = index, [], 0
        # A tensor that is made in inference mode could never be trained.
        with torch.inference_mode(mode=False), self.streams.on("inbound", slot.free_after, self._arrives.get(index)):
            for source in self._blocks[index].on_host:
                slot.views.append(tensor_at(slot.memory, start, source).copy_(source, non_blocking=True))
                start += aligned(source.nbytes)
            slot.ready = self.streams.record("inbound")
        return slot

    def _take(self, index: int, *, ahead: bool = False) -> _WeightSlot | None:
        """Return a slot for a block: an empty one, a new one, or the one whose block is needed last.

        Args:
            index: Index of the block.
            ahead: Whether the block is prefetched. It then takes no slot of a block that is needed earlier.
        """
        free = self._free_slots()
        if not any(slot.block is None for slot in free) and len(self._slots) < self._num_slots:
            return self._new_slot()
        if not free and not ahead:
            # In a step without a forward, or in a backward through more blocks at once than the model has in a row.
            return self._new_slot()
        last = len(self._coming)

        def place(slot: _WeightSlot) -> int:
            return self._coming.index(slot.block) if slot.block in self._coming else last

        if ahead:
            own = self._coming.index(index)
            free = [slot for slot in free if slot.block is None or place(slot) > own]
        if not free:
            return None
        found = max(free, key=lambda slot: (slot.block is None, place(slot)))
        self._empty(found)
        return found

    def _free_slots(self) -> list[_WeightSlot]:
        taken = [*self._brought.values(), *self._trained.values()]
        return [slot for slot in self._slots if slot not in taken]

    def _new_slot(self) -> _WeightSlot:
        with torch.inference_mode(mode=False), claimed_at_birth("parameters"):
            memory = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self.device)
        claim(memory, "parameters")
        # Earlier computation may still use this memory.
        self._slots.append(_WeightSlot(memory, self.streams.record()))
        return self._slots[-1]

    def _empty(self, slot: _WeightSlot) -> None:
        slot.block, slot.views = None, []


def _has_form_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
