"""State that is offloaded between turns and passes through the device in chunks.

Between its turns a group's state is in an `OffloadBuffer`. Its chunks pass through the device's slots:

    inbound:    load 0, load 1, ... load n |        load n + 1 ...
    computing:     forward, backward       | step 0   step 1     step 2 ...  | next forward ...
    outbound:                              |         store 0    store 1 ...      store n

As many chunks as `DeviceSlots.prefetch_bytes` has room for are prefetched from the beginning of the group's turn, so
that their loads overlap with forward and backward. Without such room, two are loaded when the group's first gradient
arrives. Write backs overlap with all later computation: only the next use of a slot waits for them.

If a group's turn has several updates, the chunks that `prefetch_bytes` has room for stay in their slots from one to the
next. They are written back when the turn ends, or when their offloaded state is read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from typing_extensions import override

from slivertune.core.copy_streams import Event
from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.hift import device_pieces
from slivertune.hift.cutting import cut_group
from slivertune.hift.device_pieces import DevicePieces
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.loaded_piece import Copies, LoadedPiece, leaf_data, moved_to_slot
from slivertune.hift.masters import refresh_master
from slivertune.hift.nested_state import unflatten_state
from slivertune.hift.offload_buffer import Copy, NewBuffer, OffloadedState, waiting_bytes
from slivertune.hift.offloaded_gradient import OffloadedGradient
from slivertune.hift.piece import OwnHyperparameters, ParamGroups, Slice, Weight, check_rules, drop_gradient
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import MASTER, ResidentGroup, WeightState
from slivertune.hift.rotation import LearningRate
from slivertune.hift.stochastic_rounding import rounding_of

WORKING_PIECES = 2
"""Chunks on the device in a backward and a step, whatever the room: one is stepped while the next is loaded."""
_ALWAYS = 2**30
"""Slots that may be in use if one is needed in any case."""


class StreamedGroup(ResidentGroup):
    """A group whose masters and state are offloaded to a buffer, with the interface of `ResidentGroup`.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
        slots_of: Function that returns the slots of a device, which all groups on it share.
        new_buffer: Function that makes the owner of the stored tensors.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        meter: StepMeter,
        slots_of: Callable[[torch.device], DeviceSlots],
        new_buffer: NewBuffer,
    ) -> None:
        super().__init__(weights, meter)
        self._slots_of = slots_of
        self._new_buffer = new_buffer
        self._turn: list[str] = []
        """Names of the weights stepped since `end`, in order."""
        self._is_first_turn = False
        self._offloaded: OffloadedState | None = None
        self._offloaded_from: torch.device | None = None
        """Device that the state in `_offloaded` belongs to."""
        self._loads_gradients = False
        """Whether this update's offloaded gradients are complete, and are loaded with their chunks."""
        self._to_load: list[int] | None = None
        """Chunks of this update that are neither loaded nor stepped, in the order of their steps, None before any."""
        self._slot_bytes = 0
        """Bytes of the group's largest chunk."""
        self._stays = False
        """Whether the next update is this group's, too."""
        self._is_dropped = False
        """Whether all state is discarded after this update."""
        self._in_slots = DevicePieces()
        self._arriving: set[str] = set()
        """Names of weights that `load_weight` loads, for whose copies the computation does not wait yet."""

    @property
    @override
    def is_offloaded(self) -> bool:
        return self._offloaded is not None

    @override
    def prefetch(self, *, in_backward: bool = False) -> None:
        self._follow_the_model()
        if self._offloaded is None or self._is_first_turn:
            return  # there is nothing to load yet
        buffer = self._offloaded.buffer
        if not (buffer.is_resident or buffer.is_loaded):
            return  # the file is still being read
        self._cut()
        self._begin_loading()
        self._load_ahead(WORKING_PIECES if in_backward else 0)

    @override
    def begin(self, *, stays: bool, update: int) -> None:
        self._rounding = rounding_of(self._meter.config, update)
        self._stays = stays
        self._is_dropped = not stays and self._meter.config.state == "discard"
        self._follow_the_model()
        self._cut()
        if self._offloaded is None:
            offloaded = self._new_state()
            if not self._is_dropped:
                offloaded.buffer.reserve(waiting_bytes(self.weights, self._meter))
            self._offloaded, self._offloaded_from = offloaded, self._device()
            self._is_first_turn = True
        self._offloaded.load()
        check_rules(self._pieces, self._meter.param_groups)

    @override
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        names = {weight.name: None for weight in weights}
        self.load_gradients()
        own = [index for index, piece in enumerate(self._pieces) if piece.slices[0].weight.name in names]
        self._turn += self._in_order(names)
        unstepped = Counter(one.weight.name for index in own for one in self._pieces[index].slices)
        try:
            for position, index in enumerate(own):
                if position == 0 or index not in self._in_slots.loaded:
                    self._expect(own[position:])
                self._step_piece(index, param_groups, held_lr)
                self._store(index, unstepped)
                self._load_ahead(WORKING_PIECES)
        except BaseException:
            self._is_first_turn = False
            self.release()
            raise
        for weight in weights:
            drop_gradient(weight)

    @override
    def load_gradients(self) -> None:
        if self._meter.config.gradients == "device" or self._loads_gradients:
            return
        if any(isinstance(w.parameter.grad, OffloadedGradient) for w in self.weights):
            self._loads_gradients = True
            for index in self._in_slots.loaded:
                self._load_gradients(index)

    @override
    def end(self) -> None:
        self._is_first_turn = False
        if not self._stays:
            device_pieces.give_up_staying(self._in_slots, self._slots)
        self._end_loading()
        self._slots.shrink()
        # Gradients arrive in nearly the same order every time, so the next chunks can be loaded ahead.
        expected = {name: place for place, name in enumerate(self._turn)}
        order = sorted(
            range(len(self._pieces)),
            key=lambda index: expected.get(self._pieces[index].slices[0].weight.name, len(expected)),
        )
        self._pieces = [self._pieces[index] for index in order]
        device_pieces.reorder(self._in_slots, order)
        self._turn = []

    @override
    def release(self, to_bytes: int | None = None) -> None:
        device_pieces.give_up_staying(self._in_slots, self._slots)
        self._end_loading()
        self._slots.shrink(to_bytes)

    @override
    def export(self, *, lasts: bool = True) -> dict[str, WeightState]:
        if self._offloaded is None:
            return {}
        device_pieces.settle(self._in_slots, self._slots)
        return self._offloaded.export(self.weights, lasts=lasts)

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        if state:
            self._offloaded_from = self._device()
            offloaded = self._new_state()
            offloaded.restore(self.weights, state)
            self._offloaded = offloaded
        self._restored_own = own

    @override
    def discard(self) -> None:
        device_pieces.forget_owed(self._in_slots)
        self.release()
        super().discard()
        self._turn = []
        self._is_first_turn = False
        self._offloaded = self._offloaded_from = None

    def on_master(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return the weights whose fp32 masters this group stores."""
        return [weight for weight in weights if self._meter.steps_master(weight)]

    def place_master(self, weight: Weight, exact: torch.Tensor) -> None:
        """Store the master of a weight, which the first step would make otherwise. An existing one follows the value.

        Args:
            weight: Weight of the group.
            exact: Value of the weight, on any device.
        """
        if self._offloaded is None:
            offloaded = self._new_state()
            offloaded.buffer.reserve(waiting_bytes(self.weights, self._meter))
            self._offloaded, self._offloaded_from = offloaded, self._device()
        if self._offloaded.has(weight, MASTER):
            self.write_master(weight, exact)
        else:
            self._offloaded.place(weight, MASTER, exact.detach().cpu().float())

    def waiting_master(self, weight: Weight) -> torch.Tensor:
        """Return the stored fp32 master of a weight, not a copy, on the host, after all write backs have ended."""
        self._follow_the_model()
        assert self._offloaded is not None
        device_pieces.settle(self._in_slots, self._slots)
        return self._offloaded.whole(weight, MASTER)

    def write_master(self, weight: Weight, written: torch.Tensor) -> None:
        """Update a master from the values that were written to its weight.

        Args:
            weight: Weight of the group.
            written: Values of the weight's shape, on any device.
        """
        refresh_master(self.waiting_master(weight), written.detach().cpu())

    def load_weight(self, weight: Weight, into: torch.Tensor) -> Event:
        """Queue the copies that load a weight from its master, rounded, part by part through one slot.

        Args:
            weight: Weight of the group.
            into: Tensor on the device, of the weight's shape.

        Returns:
            Event after which it is complete.
        """
        self._follow_the_model()
        assert self._offloaded is not None
        device_pieces.give_up_staying(self._in_slots, self._slots)
        master, target = self._offloaded.whole(weight, MASTER).view(-1), into.view(-1)
        slots, ready = self._slots, None
        # One size for all: a slot that is too small for the next weight would be given up, which waits for its copies.
        largest = max(each.parameter.numel() for each in self.weights)
        length = min(self._meter.config.piece_bytes // master.itemsize or largest, largest)
        for source, part in zip(master.split(length), target.split(length), strict=True):
            slot = slots.take(length * master.itemsize, at_least=_ALWAYS)
            assert slot is not None
            with slots.streams.on("inbound", slots.streams.record(), slot.free_after, *self._in_slots.stored.values()):
                part.copy_(tensor_at(slot.memory, 0, source).copy_(source, non_blocking=True))
                ready = slots.streams.record("inbound")
            slots.give_back(slot, ready)
        self._arriving.add(weight.name)
        return ready

    def end_loading(self, weight: Weight) -> None:
        """Note that the computation waits for the copies of a weight that `load_weight` has queued.

        Once it waits for all copies in flight, taking back their slot adds no wait.

        Args:
            weight: Weight of the group.
        """
        self._arriving.discard(weight.name)
        if not self._arriving:
            self._slots.shrink()

    @property
    def _slots(self) -> DeviceSlots:
        return self._slots_of(self._offloaded_from or self._device())

    def _follow_the_model(self) -> None:
        """Move the state along if the model has moved to another device: its memory is right for one device only."""
        if self._offloaded is not None and self._offloaded_from != self._device():
            state, own = self.export(), self.own_hyperparameters()
            self.discard()
            self.restore(state, own)

    def _device(self) -> torch.device:
        devices = {weight.device for weight in self.weights}
        if len(devices) > 1:
            raise ValueError(
                f"a group's weights lie on {sorted(map(str, devices))} and must lie on one device. "
                "Lower layers_per_group, or move the model"
            )
        return devices.pop()

    def _new_state(self) -> OffloadedState:
        streams = self._slots_of(self._device()).streams
        return OffloadedState(self._new_buffer(streams))

    def _cut(self) -> None:
        """Cut the group into chunks, in the order in which they are stepped."""
        if not self._pieces:
            places = {name: place for place, name in enumerate(self._in_order([each.name for each in self.weights]))}
            pieces = cut_group(self.weights, self._meter)
            self._pieces = sorted(pieces, key=lambda piece: places[piece.slices[0].weight.name])

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Return the weights of a step in the order in which they are stepped.

        A backward makes the gradients of the last weights first, so with `gradients="host"` these are stepped first.
        """
        return list(names)[::-1] if self._meter.config.gradients == "host" else list(names)

    # The way of one chunk through the device.

    def _begin_loading(self) -> None:
        if self._to_load is None:
            device_pieces.begin_update(self._in_slots)
            loaded = self._in_slots.loaded
            self._to_load = [index for index in range(len(self._pieces)) if index not in loaded]
            if self._loads_gradients:
                for index in loaded:
                    self._load_gradients(index)
            # One size for all, so that a slot serves any chunk.
            self._slot_bytes = max((self._bytes_on_device(index) for index in range(len(self._pieces))), default=0)

    def _bytes_on_device(self, index: int) -> int:
        waiting = sum(aligned(each.nbytes) for of_slice in self._waiting(index) for each in of_slice.values())
        if self._meter.config.gradients == "device":
            return waiting
        slices = self._pieces[index].slices
        return waiting + sum(aligned((one.stop - one.start) * one.weight.parameter.itemsize) for one in slices)

    def _waiting(self, index: int) -> list[dict[str, torch.Tensor]]:
        """Return the offloaded tensors of each slice of a chunk, by key."""
        assert self._offloaded is not None
        return [self._offloaded.tensors_of(one) for one in self._pieces[index].slices]

    def _expect(self, own: Sequence[int]) -> None:
        """Ensure that the chunks to step now are loaded, or the next to be."""
        if self._is_first_turn and not self._loads_gradients:
            return
        self._begin_loading()
        loaded = self._in_slots.loaded
        if own and own[0] not in loaded:
            # Not the expected chunk: evict the chunks that were loaded ahead.
            assert self._to_load is not None
            waiting = {*self._to_load, *loaded}
            device_pieces.give_up_loaded(self._in_slots, self._slots)
            self._to_load = [*own, *sorted(waiting.difference(own))]
        self._load_ahead(WORKING_PIECES)

    def _load_ahead(self, at_least: int) -> None:
        """Load the next chunks, as many as there are slots for, but at least `at_least` beside those that stay."""
        if at_least:
            at_least += device_pieces.num_staying(self._in_slots)
        while self._to_load and self._load(self._to_load[0], at_least):
            self._to_load.pop(0)

    def _load(self, index: int, at_least: int) -> bool:
        """Queue the copies of a chunk's offloaded tensors into a slot. Return whether there was one."""
        slots, start = self._slots, 0
        slot = slots.take(self._slot_bytes, at_least)
        if slot is None:
            return False
        tensors = []
        with slots.streams.on("inbound", slot.free_after, self._in_slots.stored.get(index)):
            for of_slice in self._waiting(index):
                on_device = {}
                for key, source in of_slice.items():
                    on_device[key] = tensor_at(slot.memory, start, source).copy_(source, non_blocking=True)
                    start += aligned(source.nbytes)
                tensors.append(on_device)
            ready = slots.streams.record("inbound")
        self._in_slots.loaded[index] = LoadedPiece(slot, tensors, start, ready)
        if self._loads_gradients:
            self._load_gradients(index)
        return True

    def _load_gradients(self, index: int) -> None:
        """Queue the copies of the offloaded gradients of a loaded chunk."""
        loaded, streams = self._in_slots.loaded[index], self._slots.streams
        if loaded.gradients is not None:
            return
        loaded.gradients, start = [], loaded.num_bytes
        for one in self._pieces[index].slices:
            gradient, part = one.weight.parameter.grad, None
            if isinstance(gradient, OffloadedGradient):
                source = gradient.part_on_host(one.start, None if one.is_whole else one.stop)
                part = tensor_at(loaded.slot.memory, start, source)
                start += aligned(source.nbytes)
                # The gradient was made after the last step, which has read the previous content.
                with streams.on("inbound", gradient.stored):
                    part.copy_(source, non_blocking=True)
                    loaded.ready = streams.record("inbound")
            loaded.gradients.append(part)

    def _gradient_of(self, one: Slice, loaded: LoadedPiece | None, position: int) -> torch.Tensor | None:
        """Return a slice's part of an offloaded gradient as it was loaded, or None if it was not."""
        gradient = one.weight.parameter.grad
        if not isinstance(gradient, OffloadedGradient):
            return None
        part = loaded.gradients[position] if loaded is not None and loaded.gradients is not None else None
        if part is None:
            return None
        return gradient.complete_for_step(part, one.start, None if one.is_whole else one.stop)

    def _end_loading(self) -> None:
        device_pieces.give_up_loaded(self._in_slots, self._slots)
        self._to_load, self._loads_gradients = None, False

    def _may_stay(self, index: int) -> bool:
        """Return whether a chunk is needed in the next update, too, and there is room for it until then."""
        if not self._stays or not self._slot_bytes:
            return False
        num_slots = self._slots.prefetch_bytes // self._slot_bytes
        return device_pieces.may_stay(self._in_slots, index, len(self._pieces), num_slots)

    def _step_piece(self, index: int, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step a chunk, after pointing its leaves and state to the loaded tensors, or making its masters."""
        assert self._offloaded is not None
        piece, loaded = self._pieces[index], self._in_slots.loaded.get(index)
        assert loaded is not None or self._is_first_turn, "a piece with state is stepped from what was loaded"
        if loaded is not None:
            self._slots.streams.compute_after(loaded.ready)
        states = []
        for position, one in enumerate(piece.slices):
            tensors = dict(loaded.tensors[position]) if loaded is not None else {}
            scalars = self._offloaded.host_values_of(one)
            part = one.part_of_weight()
            data = leaf_data(one, part, tensors)
            if one.on_master and not self._is_first_turn:
                refresh_master(data, part)
            one.place_leaf(data)
            one.attach_gradient(self._gradient_of(one, loaded, position))
            states.append(unflatten_state({**tensors, **scalars}))
        instance = piece.instance or piece.build(self._meter.base, param_groups, self._restored_own)
        # If the state is empty, the constructor's stays.
        instance.optimizer.state.update(
            {one.leaf: state for one, state in zip(piece.slices, states, strict=True) if state}
        )
        instance.push(param_groups, held_lr)
        instance.step(self._rounding)

    def _store(self, index: int, unstepped: Counter[str]) -> None:
        """Write a chunk's weights, queue the write back of its state, and give its slot back, unless it stays.

        Args:
            index: Index of the chunk.
            unstepped: Number of slices left to step, by weight. The chunk's slices are subtracted from it.
        """
        piece, loaded = self._pieces[index], self._in_slots.loaded.get(index)
        assert self._offloaded is not None
        assert piece.instance is not None
        leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        is_from_slot, may_stay = loaded is not None, True
        try:
            for position, one in enumerate(piece.slices):
                state = piece.instance.optimizer.state.pop(one.leaf, {})
                one.write_weight(self._rounding)
                if one.on_master:
                    state[MASTER] = one.leaf.data
                copies: Sequence[Copy] = () if self._is_dropped else self._offloaded.receive(one, state)
                if loaded is not None:
                    own = loaded.tensors[position]
                    # What the step has left on the host is out of date in the slot.
                    may_stay = may_stay and {key for key in own if not own[key].dim()} <= {key for key, _, _ in copies}
                    copies, moved = moved_to_slot(copies, own)
                    is_from_slot = is_from_slot and moved
                leaving += [(source, target) for _, source, target in copies]
                unstepped[one.weight.name] -= 1
                one.drop_gradient(is_last=not unstepped[one.weight.name])
                one.place_leaf(torch.empty(0, dtype=one.leaf.dtype, device="cpu"))
        except BaseException:
            # The places of what was received are in use, and what has stayed exists in the slot alone.
            owed = [] if loaded is None or loaded.owed is None else loaded.owed
            self._let_go(index, [*owed, *leaving], is_from_slot=is_from_slot)
            raise
        if loaded is not None and is_from_slot and may_stay and self._may_stay(index):
            device_pieces.let_stay(self._in_slots, index, leaving, self._waiting(index), self._slots)
        else:
            self._let_go(index, leaving, is_from_slot=is_from_slot)

    def _let_go(self, index: int, copies: Copies, *, is_from_slot: bool) -> None:
        """Queue a chunk's write back, and give its slot back behind it."""
        stored = device_pieces.write_back(self._in_slots, index, copies, self._slots)
        if not is_from_slot:
            self._slots.streams.compute_after(stored)  # before the memory of new tensors is used again
        loaded = self._in_slots.loaded.pop(index, None)
        if loaded is not None:
            self._slots.give_back(loaded.slot, stored)
