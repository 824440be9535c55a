"""Groups whose masters and state wait in files (`state="disk"`), and pass through buffers of host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams
from slivertune.core.ledger import claim
from slivertune.hift.config import HiFTConfig
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.file_store import NUM_BUFFERS, FileStore, GroupFile
from slivertune.hift.group_image import Name, image_of, lies_plainly, mapped_tensors
from slivertune.hift.masters import hash_of_bits
from slivertune.hift.offload_buffer import (
    LOW,
    OffloadBuffer,
    OffloadedState,
    aligned,
    host_buffer,
    tensor_at,
    waiting_bytes,
)
from slivertune.hift.piece import OwnHyperparameters, ParamGroups, Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import MASTER, WeightState
from slivertune.hift.rotation import LearningRate
from slivertune.hift.streamed import StreamedGroup

_HEADER_BYTES = 2**16
"""Room that is taken for a file beside what waits."""


class _LentBuffer(OffloadBuffer):
    """Tensors of all dtypes in memory that was lent; what does not fit lies elsewhere in host memory.

    Args:
        memory: uint8, one dimension.
        streams: Copy to and from it.
    """

    def __init__(self, memory: torch.Tensor, streams: CopyStreams) -> None:
        super().__init__("host", streams.host_memory)
        self._memory = memory
        self._used = 0

    @override
    def reserve(self, num_bytes: Mapping[torch.dtype, int]) -> None:
        """Nothing: the memory was there before."""

    @override
    def empty_like(self, model: torch.Tensor) -> torch.Tensor:
        start, stop = self._used, self._used + aligned(model.nbytes)
        if stop > self._memory.numel():
            super().reserve({model.dtype: aligned(max(1, model.nbytes))})
            return super().empty_like(model)
        self._used = stop
        return tensor_at(self._memory, start, model)


class DiskGroup(StreamedGroup):
    """A group whose state waits in a file; in host memory, if `state_ram_bytes` leaves room for it there.

    Args:
        weights: What the group trains.
        meter: Measures the base optimizer's steps, and knows HiFT's settings.
        slots_of: Gives the slots of a device, which all groups on it share.
        files: Has the file, if there is one.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        meter: StepMeter,
        slots_of: Callable[[torch.device], DeviceSlots],
        files: DiskState,
    ) -> None:
        super().__init__(weights, meter, slots_of)
        self._files = files
        self._bound: torch.Tensor | None = None
        """The memory in which the waiting tensors lie."""
        self._places: dict[Name, tuple[int, torch.Tensor]] = {}
        """Where in it they begin, and a tensor without data that is like each."""
        self._bits: dict[str, torch.Tensor] = {}
        """Of the weights with masters: a hash of what they were at the group's last step."""

    @property
    def file(self) -> GroupFile | None:
        """The group's file; None where it waits in host memory."""
        return self._files.file_of(self)

    @override
    def prefetch(self, *, in_backward: bool = False) -> None:
        self._follow_the_model()
        if self._offloaded is not None and self.file is not None and not self._is_first_turn:
            memory = self._files.store.memory_of(self.file)
            if memory is None:
                return  # it is still being read
            self._bind(memory)
        super().prefetch(in_backward=in_backward)

    @override
    def begin(self) -> None:
        self._follow_the_model()
        if self._offloaded is not None and self.file is not None:
            self._bind(self._files.store.use(self.file))
        super().begin()

    @override
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        try:
            super().step(weights, param_groups, held_lr)
        except BaseException:
            self._hand_over()
            raise

    @override
    def end(self) -> None:
        super().end()
        self._hand_over()

    @override
    def export(self) -> dict[str, WeightState]:
        if self._offloaded is None or self.file is None:
            return super().export()
        self._slots.streams.synchronize()
        if self.file.is_in_use:
            self._hand_over()
        self._files.store.settle(self.file)
        mapped = mapped_tensors(self.file.path, {name: model for name, (_, model) in self._places.items()})
        for tensor in mapped.values():
            claim(tensor, "state", "disk")
        return self._offloaded.export(self.weights, mapped, self._written_weights())

    def saved_file(self) -> Path | None:
        """The file with all that `export` has just returned, in the form of a checkpoint's; None where there is none.

        It is none while others have written to a weight, whose master then follows it, and for state that the form
        does not know (split masters, tensors inside of others).
        """
        if self._offloaded is None or self.file is None or self.file.written is None:
            return None
        is_known = not self._offloaded.is_nested and all(
            key != LOW and lies_plainly(model) for (_, key), (_, model) in self._places.items()
        )
        return self.file.path if is_known and not self._written_weights() else None

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        super().restore(state, own)
        if self._offloaded is not None and self.file is not None:
            # The weights are about to be set to these.
            self._note_bits(
                {
                    weight.name: state[weight.name][MASTER].to(weight.parameter.dtype)
                    for weight in self.weights
                    if MASTER in state.get(weight.name, {})
                }
            )
            self._hand_over(notes_bits=False)

    @override
    def discard(self) -> None:
        super().discard()
        self._bound, self._places, self._bits = None, {}, {}
        if self._files.is_open and self.file is not None:
            self._files.store.forget(self.file)

    @override
    def _new_state(self) -> OffloadedState:
        streams = self._slots_of(self._device()).streams
        split = self._meter.config.master == "split"
        if self.file is None:
            return OffloadedState(host_buffer(streams), split=split)
        self._bound = self._files.store.lend(self.file, streams)
        return OffloadedState(_LentBuffer(self._bound, streams), split=split)

    @override
    def _drop_loaded(self) -> None:
        # What is copied from the buffer and not used any more must not keep others from writing to it unseen.
        if self._files.is_open and self.file is not None and self._loaded:
            self._files.store.note_copies(self.file, [loaded.ready for loaded in self._loaded.values()])
        super()._drop_loaded()

    def _bind(self, memory: torch.Tensor) -> None:
        """Let the waiting tensors lie where the state has been read to."""
        if memory is not self._bound:
            assert self._offloaded is not None
            self._offloaded.replace_tensors(
                {name: tensor_at(memory, start, model) for name, (start, model) in self._places.items()}
            )
            self._bound = memory
            self._offloaded.buffer = _LentBuffer(memory[self._num_used :], self._slots.streams)

    @property
    def _num_used(self) -> int:
        return max((start + aligned(model.nbytes) for start, model in self._places.values()), default=0)

    def _hand_over(self, *, notes_bits: bool = True) -> None:
        """Let the state be written behind the turn."""
        if self._offloaded is None or self.file is None or not self.file.is_in_use:
            return
        if notes_bits:
            self._note_bits({w.name: w.parameter for w in self.weights if self._meter.steps_master(w)})
        self._note_places()
        self._files.store.note_copies(self.file, list(self._stored.values()))
        self._files.store.hand_over(self.file, image_of(self._places))

    def _note_places(self) -> None:
        assert self._offloaded is not None
        assert self._bound is not None
        tensors = self._offloaded.waiting_tensors()
        begin, end = self._bound.data_ptr(), self._bound.data_ptr() + self._bound.numel()
        if not all(
            begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for tensor in tensors.values()
        ):
            tensors = self._gather(tensors)
            begin = self._bound.data_ptr()
        self._places = {
            name: (tensor.data_ptr() - begin, torch.empty_like(tensor, device="meta"))
            for name, tensor in tensors.items()
        }

    def _gather(self, tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Bring together what has outgrown the buffer."""
        assert self.file is not None
        assert self._offloaded is not None
        self._slots.streams.synchronize()
        total = sum(aligned(tensor.nbytes) for tensor in tensors.values())
        self._bound = self._files.store.enlarge(self.file, total)
        buffer = self._offloaded.buffer = _LentBuffer(self._bound, self._slots.streams)
        gathered = {name: buffer.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
        self._offloaded.replace_tensors(gathered)
        return gathered

    def _note_bits(self, weights: Mapping[str, torch.Tensor]) -> None:
        # They stay on the device: to wait for them here would keep the host from running ahead.
        self._bits = {name: hash_of_bits(weight) for name, weight in weights.items()}
        for bits in self._bits.values():
            claim(bits, "state")

    def _written_weights(self) -> set[str]:
        """Weights with masters that others have written to since the group's last step."""
        now = {w.name: hash_of_bits(w.parameter) for w in self.weights if w.name in self._bits}
        return {name for name, bits in now.items() if int(bits) != int(self._bits[name])}


class DiskState:
    """Which groups wait in files, and the store of these; decided and opened at the first update or load.

    Args:
        config: HiFT's settings.
        meter: Knows what waits of a group.
    """

    def __init__(self, config: HiFTConfig, meter: StepMeter) -> None:
        self._config = config
        self._meter = meter
        self._files: dict[DiskGroup, GroupFile] = {}
        self._store: FileStore | None = None
        self._coming: Sequence[int] = ()
        self.opened = ExitStack()
        """Removes all files when it is closed; holds neither groups nor weights."""
        self.groups: Sequence[DiskGroup] = ()
        """All groups' owners of state, by index."""

    @property
    def is_open(self) -> bool:
        """Whether it is decided."""
        return self._store is not None

    @property
    def store(self) -> FileStore:
        """The files' store, once it is open."""
        assert self._store is not None
        return self._store

    def file_of(self, group: DiskGroup) -> GroupFile | None:
        """A group's file; None of one that waits in host memory."""
        assert self._store is not None, "no group has state before the files' store is open"
        return self._files.get(group)

    def open(self) -> None:
        """Take room on the disk for all groups and one more, if that was not done before.

        Raises:
            OSError: If there is no room, or no folder; names it.
        """
        if self._store is not None:
            return
        sizes = [sum(waiting_bytes(group.weights, self._meter).values()) for group in self.groups]
        on_disk = groups_on_disk(sizes, self._config.state_ram_bytes)
        files = [sizes[index] + _HEADER_BYTES for index in on_disk]
        self._store = FileStore(
            Path(self._config.state_dir or "."),
            num_buffers=NUM_BUFFERS,
            buffer_bytes=max((sizes[index] for index in on_disk), default=0),
            needs_bytes=sum(files) + max(files, default=0),
        )
        self.opened.callback(self._store.close)
        self._files = {self.groups[index]: self._store.add(index) for index in on_disk}
        self.begin_turn(self._coming)

    def begin_turn(self, coming: Sequence[int]) -> None:
        """Read what comes next, and write what is not needed for a while.

        Args:
            coming: All groups by index, in the order of their turns from the active one on; none before all are loaded.
        """
        self._coming = coming
        if self._store is not None:
            self._store.expect(
                self._files[each] for each in map(self.groups.__getitem__, coming) if each in self._files
            )

    def check(self) -> None:
        """Try again what could not be written.

        Raises:
            OSError: If it still can't be; nothing is lost.
        """
        if self._store is not None:
            self._store.check()


def groups_on_disk(sizes: Sequence[int], ram_bytes: int) -> list[int]:
    """Which groups wait in files: as many as fit into some memory stay in it, the smallest first.

    They stay there for good. Every group is needed once a cycle, so that one kept for having been used last would be
    given up just before its next turn.

    Args:
        sizes: Bytes of each group.
        ram_bytes: Of the memory.

    Returns:
        The indices of the others, in order.
    """
    left, on_disk = ram_bytes, []
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        if sizes[index] <= left:
            left -= sizes[index]
        else:
            on_disk.append(index)
    return sorted(on_disk)
