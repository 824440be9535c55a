"""Groups whose masters and state wait in files (`state="disk"`), and pass through buffers of host memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.core.ledger import claim
from slivertune.core.torch_internals import storage_key
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.disk_state import DiskState
from slivertune.hift.group_file import GroupFile
from slivertune.hift.group_image import Name, image_of, lies_plainly
from slivertune.hift.masters import hash_of_bits, refresh_master
from slivertune.hift.offload_buffer import OffloadBuffer, OffloadedState, host_buffer
from slivertune.hift.piece import OwnHyperparameters, ParamGroups, Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import MASTER, WeightState
from slivertune.hift.rotation import LearningRate
from slivertune.hift.streamed import StreamedGroup


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
        self.files = files
        """Has the file, and those of all others."""
        self._bound: torch.Tensor | None = None
        """The memory in which the waiting tensors lie."""
        self._places: dict[Name, tuple[int, torch.Tensor]] = {}
        """Where in it they begin, and a tensor without data that is like each."""
        self._bits: dict[str, torch.Tensor] = {}
        """Of the weights with masters: a hash of what they were at the group's last step."""

    @property
    def file(self) -> GroupFile | None:
        """The group's file; None where it waits in host memory."""
        return self.files.file_of(self)

    @override
    def prefetch(self, *, in_backward: bool = False) -> None:
        self._follow_the_model()
        if self._offloaded is not None and self.file is not None and not self._is_first_turn:
            memory = self.files.store.memory_of(self.file)
            if memory is None:
                return  # it is still being read
            self._bind(memory)
        super().prefetch(in_backward=in_backward)

    @override
    def begin(self, *, stays: bool) -> None:
        self._follow_the_model()
        if self._offloaded is not None and self.file is not None:
            self._bind(self.files.store.use(self.file))
        # Its file is written after each update, from the memory in which the state waits.
        super().begin(stays=stays and self.file is None)

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
        mapped = self._mapped(self.file, self._places)
        for tensor in mapped.values():
            claim(tensor, "state", "disk")
        return self._offloaded.export(self.weights, mapped, self._written_weights())

    @override
    def place_master(self, weight: Weight, exact: torch.Tensor) -> None:
        if self._offloaded is None:
            self.files.open()
        super().place_master(weight, exact)

    @override
    def end_placing(self) -> None:
        self._hand_over(notes_bits=False)

    @override
    def waiting_master(self, weight: Weight) -> torch.Tensor:
        self._follow_the_model()
        if self.file is None:
            return super().waiting_master(weight)
        name = (weight.name, MASTER)
        return self._mapped(self.file, [name])[name]

    @override
    def write_master(self, weight: Weight, written: torch.Tensor) -> None:
        self._follow_the_model()
        if self.file is None:
            super().write_master(weight, written)
            return
        assert self._offloaded is not None
        self._slots.streams.synchronize()
        self._bind(self.files.store.use(self.file))
        refresh_master(self._offloaded.whole(weight, MASTER), written.detach().cpu())
        self._hand_over(notes_bits=False)

    @override
    def load_weight(self, weight: Weight, into: torch.Tensor) -> Event:
        self._follow_the_model()
        if self.file is None:
            return super().load_weight(weight, into)
        self._bind(self.files.store.bring(self.file))
        ready = super().load_weight(weight, into)
        self.files.store.note_copy(self.file, ready)
        return ready

    def saved_file(self) -> Path | None:
        """The file with all that `export` has just returned, in the form of a checkpoint's; None where there is none.

        It is none while others have written to a weight, whose master then follows it, and for state that the form
        does not know (tensors inside of others).
        """
        if self._offloaded is None or self.file is None or self.file.written is None:
            return None
        is_known = not self._offloaded.is_nested and all(lies_plainly(model) for _, model in self._places.values())
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
        if self.files.is_open and self.file is not None:
            self.files.store.forget(self.file)

    @override
    def _new_state(self) -> OffloadedState:
        streams = self._slots_of(self._device()).streams
        if self.file is None:
            return OffloadedState(host_buffer(streams))
        self._bound = self.files.store.lend(self.file, streams)
        return OffloadedState(_LentBuffer(self._bound, streams))

    def _mapped(self, file: GroupFile, names: Iterable[Name]) -> dict[Name, torch.Tensor]:
        """Waiting tensors, as the file has them by now."""
        self._slots.streams.synchronize()
        if file.is_in_use:
            self._hand_over()
        self.files.store.settle(file)
        return self.files.store.mapped(file, {name: self._places[name][1] for name in names})

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
        self.files.store.hand_over(self.file, image_of(self._places), list(self._in_slots.stored.values()))

    def _note_places(self) -> None:
        assert self._offloaded is not None
        assert self._bound is not None
        tensors = self._offloaded.waiting_tensors()
        of_buffer = storage_key(self._bound.untyped_storage())
        if any(storage_key(tensor.untyped_storage()) != of_buffer for tensor in tensors.values()):
            tensors = self._gather(tensors)
        self._places = {
            name: (_first_byte(tensor) - _first_byte(self._bound), torch.empty_like(tensor, device="meta"))
            for name, tensor in tensors.items()
        }

    def _gather(self, tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Bring together what has outgrown the buffer."""
        assert self.file is not None
        assert self._offloaded is not None
        self._slots.streams.synchronize()
        total = sum(aligned(tensor.nbytes) for tensor in tensors.values())
        self._bound = self.files.store.enlarge(self.file, total)
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
        present = [w for w in self.weights if w.name in self._bits and not w.is_waiting]
        now = {w.name: hash_of_bits(w.parameter) for w in present}
        return {name for name, bits in now.items() if int(bits) != int(self._bits[name])}


def _first_byte(tensor: torch.Tensor) -> int:
    """Where in its storage a tensor begins."""
    return int(tensor.storage_offset()) * tensor.itemsize
