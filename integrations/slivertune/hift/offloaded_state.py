"""State that is offloaded between turns and passes through the device in chunks.

Between its turns a group's state is in a `StateStore`. Its chunks pass through the device's slots:

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
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.repeated_work import repeating
from slivertune.hift.chunk import (
    MASTER,
    Chunk,
    OwnHyperparameters,
    ParamGroups,
    StepCopies,
    Weight,
    drop_gradient,
    refresh_master,
)
from slivertune.hift.cutting import cut_group
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.group_state import GroupState, WeightState, adapted_by_instances, check_rules, chunks_of
from slivertune.hift.left_out import few_of, finish_left_out
from slivertune.hift.nested_state import unflatten_state
from slivertune.hift.offload_buffer import NewStore, StateStore, counts_state, offloaded_bytes
from slivertune.hift.offloaded_gradient import OffloadedGradient
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import LearningRate
from slivertune.hift.stochastic_rounding import StochasticRounding, rounding_of

WORKING_CHUNKS = 2
"""Chunks on the device in a backward and a step, whatever the room: one is stepped while the next is loaded."""
PASSING_CHUNKS = 3
"""Slots left to the other chunks if some stay resident: one loads, one is stepped, one is written back."""
_ALWAYS = 2**30
"""Slots that may be in use if one is needed in any case."""


class OffloadedState(GroupState):
    """Masters and state that are offloaded to a store between the group's turns.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
        slots_of: Function that returns the slots of a device, which all groups on it share.
        new_store: Function that makes a store.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        meter: StepMeter,
        slots_of: Callable[[torch.device], DeviceSlots],
        new_store: NewStore,
    ) -> None:
        self.weights, self.chunks, self.restored_own = tuple(weights), [], {}
        self._meter = meter
        self._config = meter.config
        self._slots_of = slots_of
        self._new_store = new_store
        self._store: StateStore | None = None
        self._rounding: StochasticRounding | None = None
        """Rounding of the current update, if weights have fp32 copies that are no masters."""
        self._is_first_turn = False
        """Whether the state is made in this update, so that there is none to load."""
        self._turn: list[Chunk] = []
        """Chunks stepped since `end`, in order."""
        self._pending: list[Chunk] | None = None
        """Chunks of this update that are not stepped yet, in the order of their steps. None before any is loaded."""
        self._loads_gradients = False
        """Whether this update's offloaded gradients are complete, and are loaded with their chunks."""
        self._slot_bytes = 0
        """Bytes of the group's largest chunk."""
        self._stays = False
        """Whether the next update is this group's, too."""
        self._discards = False
        """Whether all state is discarded after this update."""
        self._arriving: set[str] = set()
        """Names of weights that `load_weight` loads, for whose copies the computation does not wait yet."""

    @property
    @override
    def is_offloaded(self) -> bool:
        return self._store is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory or files that hold the group's masters and state now."""
        return 0 if self._store is None else self._store.num_bytes

    @override
    def prefetch(self, *, in_backward: bool = False) -> None:
        if self._pending is None:
            self._follow_the_model()
        if self._store is None or self._is_first_turn or not self._store.is_loaded:
            return  # there is nothing to load yet, or the file is still being read
        self.chunks = self.chunks or cut_group(self.weights, self._meter, self.restored_own)
        self._begin_loading()
        self._load_ahead(WORKING_CHUNKS if in_backward else 0)

    @override
    def begin(self, *, stays: bool, update: int) -> None:
        self._stays, self._discards = stays, not stays and self._config.state == "discard"
        self._follow_the_model()
        self._rounding = rounding_of(self._config, update)
        self.chunks = self.chunks or cut_group(self.weights, self._meter, self.restored_own)
        check_rules(self.chunks, self._meter.param_groups)
        is_new = self._store is None
        store = self._open(reserves=not self._discards)
        self._is_first_turn = self._is_first_turn or is_new
        store.load()

    @override
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        self.load_gradients()
        own = chunks_of(self.chunks, weights)
        unstepped = Counter(one.weight.name for chunk in own for one in chunk.slices)
        # Chunks that are loaded ahead, or stay, are not alike.
        few = [(chunk, ()) for chunk in own] if self._slots.prefetch_bytes else few_of(own)
        stepped = [chunk for chunk, _ in few]
        try:
            for position, (chunk, left_out) in enumerate(few):
                if left_out and self._pending is not None:
                    self._pending = [each for each in self._pending if each not in left_out]
                with repeating(1 + len(left_out)):
                    self._expect(stepped[position:])
                    self._step_chunk(chunk, param_groups, held_lr)
                    self._keep_or_write_back(chunk, unstepped)
                    self._load_ahead(WORKING_CHUNKS)
                if left_out:
                    unstepped.subtract(one.weight.name for each in left_out for one in each.slices)
                    finish_left_out(left_out, chunk, None if self._discards else self._store)
        except BaseException:
            self._is_first_turn = False
            self.release()
            raise
        self._turn += own
        for weight in weights:
            drop_gradient(weight)

    @override
    def load_gradients(self) -> None:
        if self._config.gradients == "device" or self._loads_gradients:
            return
        if any(isinstance(w.parameter.grad, OffloadedGradient) for w in self.weights):
            self._loads_gradients = True
            for chunk in self._pending or ():
                chunk.load_gradients(self._slots.streams)

    @override
    def end(self) -> None:
        self._is_first_turn = False
        self._evict(self._pending or () if self._stays else self.chunks)
        # Gradients arrive in nearly the same order every time, so the next chunks can be loaded ahead.
        stepped = dict.fromkeys(self._turn)
        self.chunks = [*stepped] + [chunk for chunk in self.chunks if chunk not in stepped]
        self._turn = []

    @override
    def release(self, to_bytes: int | None = None) -> None:
        self._evict(self.chunks, to_bytes)

    @override
    def export(self, *, lasts: bool = True) -> dict[str, WeightState]:
        if self._store is None:
            return {}
        self._synchronize()
        return self._store.export(self.weights, lasts=lasts)

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        if state:
            store = self._new_store(self._slots.streams)
            store.restore(self.weights, state)
            self._store = store
        self.restored_own = own

    @override
    def discard(self) -> None:
        for chunk in self.chunks:
            chunk.owed = ()
        self.release()
        self.chunks, self.restored_own, self._turn = [], {}, []
        self._is_first_turn = False
        self._store = None

    def on_master(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return the weights whose fp32 masters this group stores."""
        return [weight for weight in weights if self._meter.steps_master(weight)]

    def place_master(self, weight: Weight, exact: torch.Tensor) -> None:
        """Store the master of a weight, which the first step would make otherwise. An existing one follows the value.

        Args:
            weight: Weight of the group.
            exact: Value of the weight, on any device.
        """
        store = self._open(reserves=True)
        if store.has(weight, MASTER):
            self.write_master(weight, exact)
        else:
            store.place(weight, MASTER, exact.detach().cpu().float())

    def offloaded_master(self, weight: Weight) -> torch.Tensor:
        """Return the stored fp32 master of a weight, not a copy, on the host, after all write backs have ended."""
        self._follow_the_model()
        assert self._store is not None
        self._synchronize()
        return self._store.whole(weight, MASTER)

    def write_master(self, weight: Weight, written: torch.Tensor) -> None:
        """Update a master from the values that were written to its weight.

        Args:
            weight: Weight of the group.
            written: Values of the weight's shape, on any device.
        """
        refresh_master(self.offloaded_master(weight), written.detach().cpu())

    def load_weight(self, weight: Weight, into: torch.Tensor) -> Event:
        """Queue the copies that load a weight from its master, rounded, part by part through one slot.

        Args:
            weight: Weight of the group.
            into: Tensor on the device, of the weight's shape.

        Returns:
            Event after which it is complete.
        """
        self._follow_the_model()
        assert self._store is not None
        self._write_back_all()
        master, target = self._store.whole(weight, MASTER).view(-1), into.view(-1)
        slots, ready = self._slots, None
        # One size for all: a slot that is too small for the next weight would be given up, which waits for its copies.
        largest = max(each.parameter.numel() for each in self.weights)
        length = min(self._config.chunk_bytes // master.itemsize or largest, largest)
        for source, part in zip(master.split(length), target.split(length), strict=True):
            taken = slots.take(length * master.itemsize, at_least=_ALWAYS)
            assert taken is not None
            memory, free_after = taken
            stored = [chunk.event for chunk in self.chunks]
            with slots.streams.on("inbound", slots.streams.record(), free_after, *stored):
                part.copy_(tensor_at(memory, 0, source).copy_(source, non_blocking=True))
                ready = slots.streams.record("inbound")
            slots.give_back(memory, ready)
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
        return self._slots_of(self._device() if self._store is None else self._store.device)

    def _open(self, *, reserves: bool) -> StateStore:
        """Return the store, made if there is none, with memory reserved for all masters and state to come."""
        if self._store is None:
            store = self._new_store(self._slots.streams)
            if reserves:
                store.reserve(offloaded_bytes(self.weights, self._meter), for_masters=not counts_state(self._meter))
            self._store = store
        return self._store

    def _follow_the_model(self) -> None:
        """Move the state along if the model has moved to another device: its memory is right for one device only."""
        if self._store is not None and self._store.device != self._device():
            state, own = self.export(), adapted_by_instances(self)
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

    # The way of the chunks to the device.

    def _begin_loading(self) -> list[Chunk]:
        """Return the chunks of this update that are not stepped yet, which are all before the first load."""
        if self._pending is not None:
            return self._pending
        assert self._store is not None
        slot_bytes = 0
        for chunk in self.chunks:
            num_bytes = 0
            for one in chunk.slices:
                for key, value in self._store.of(one).items():
                    num_bytes += aligned(value.nbytes) if one.is_on_device(key, value) else 0
                if self._config.gradients != "device":
                    num_bytes += aligned((one.stop - one.start) * one.weight.parameter.itemsize)
            slot_bytes = max(slot_bytes, num_bytes)  # one size for all, so that a slot serves any chunk
            if self._loads_gradients:
                chunk.load_gradients(self._slots.streams)
        self._pending, self._slot_bytes = list(self.chunks), slot_bytes
        return self._pending

    def _expect(self, own: Sequence[Chunk]) -> None:
        """Ensure that the chunks to step now are loaded, or the next to be."""
        if self._is_first_turn and not self._loads_gradients:
            return
        pending = self._begin_loading()
        if own[0].memory is None:
            # Not the expected chunk: evict the chunks that were loaded ahead.
            for chunk in pending:
                chunk.give_up(self._slots)
            others = set(pending).difference(own)
            self._pending = [*own, *(chunk for chunk in self.chunks if chunk in others)]
        self._load_ahead(WORKING_CHUNKS)

    def _load_ahead(self, at_least: int) -> None:
        """Load the next chunks, as many as there are slots for, but at least `at_least` beside those that stay."""
        if at_least:
            at_least += sum(chunk.where == "device" for chunk in self.chunks)
        slots = self._slots
        for chunk in self._pending or ():
            if chunk.memory is None:
                assert self._store is not None
                sources = [self._store.of(one) for one in chunk.slices]  # may have to be read, which may fail
                if (taken := slots.take(self._slot_bytes, at_least)) is None:
                    return
                chunk.load(sources, *taken, slots.streams)
                if self._loads_gradients:
                    chunk.load_gradients(slots.streams)

    # Its step, and the way back.

    def _step_chunk(self, chunk: Chunk, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step a chunk, after pointing its leaves and state to the loaded tensors, or making its masters."""
        assert self._store is not None
        assert chunk.memory is not None or self._is_first_turn, "a chunk with state is stepped from what was loaded"
        self._slots.streams.compute_after(chunk.event)
        states: dict[torch.Tensor, WeightState] = {}
        for one in chunk.slices:
            tensors = dict(one.tensors)
            data = part = one.part_of_weight()
            if one.is_rounded:
                data = part.to(torch.float32)
            elif one.on_master and MASTER in tensors:
                data = tensors.pop(MASTER)
                refresh_master(data, part)
            elif one.on_master:
                with claimed_at_birth("state"):
                    data = part.to(torch.float32)  # the group's first turn
                claim(data, "state")
            one.place_leaf(data)
            one.attach_gradient()
            for key, value in self._store.of(one).items():
                if not one.is_on_device(key, value):
                    tensors[key] = value.clone() if isinstance(value, torch.Tensor) else value
            if tensors:  # else the constructor's stays
                states[one.leaf] = unflatten_state(tensors)
        optimizer = chunk.optimizer or chunk.build(param_groups)
        optimizer.state.update(states)
        chunk.step(optimizer, param_groups, held_lr, self._rounding)

    def _keep_or_write_back(self, chunk: Chunk, unstepped: Counter[str]) -> None:
        """Write a stepped chunk's weights. Then let it stay in its slot, or queue the write back of its state.

        Args:
            chunk: The chunk.
            unstepped: Number of slices left to step, by weight. The chunk's slices are subtracted from it.
        """
        assert self._store is not None
        assert chunk.optimizer is not None
        leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        is_from_slot = may_stay = chunk.memory is not None
        try:
            for one in chunk.slices:
                state = chunk.optimizer.state.pop(one.leaf, {})
                one.write_weight(self._rounding)
                if one.on_master:
                    state[MASTER] = one.leaf.data
                copies: StepCopies = {} if self._discards else self._store.receive(one, state)
                # What the step has left on the host is out of date in the slot.
                may_stay = may_stay and {key for key, own in one.tensors.items() if not own.dim()} <= copies.keys()
                moved = one.moved_to_slot(copies) if chunk.memory is not None else None
                is_from_slot = is_from_slot and moved is not None
                leaving += copies.values() if moved is None else moved
                unstepped[one.weight.name] -= 1
                if not unstepped[one.weight.name]:
                    drop_gradient(one.weight)
                one.place_leaf(torch.empty(0, dtype=one.leaf.dtype, device="cpu"))
        except BaseException:
            # The places of what was received are in use, and what has stayed exists in the slot alone.
            chunk.write_back([*chunk.owed, *leaving], self._slots, is_from_slot=is_from_slot)
            raise
        if may_stay and is_from_slot and self._may_stay(chunk):
            for one in chunk.slices:  # without what the optimizer has dropped
                stored = self._store.of(one)
                one.tensors = {key: tensor for key, tensor in one.tensors.items() if key in stored}
            chunk.stay(leaving, self._slots.streams)
        else:
            chunk.write_back(leaving, self._slots, is_from_slot=is_from_slot)
        if self._pending is not None:
            self._pending.remove(chunk)

    def _may_stay(self, chunk: Chunk) -> bool:
        """Return whether a chunk is needed in the next update, too, and may stay while the others pass."""
        if not self._stays or not self._slot_bytes:
            return False
        chunks, num_slots = self.chunks, self._slots.prefetch_bytes // self._slot_bytes
        if num_slots >= len(chunks):
            return True
        most = num_slots - PASSING_CHUNKS
        if most <= 0 or sum(each.where == "device" and each is not chunk for each in chunks) >= most:
            return False
        index, passing = chunks.index(chunk), len(chunks) - most  # spread evenly, so that the bus stays busy
        return index * passing // len(chunks) == (index + 1) * passing // len(chunks)

    def _evict(self, chunks: Iterable[Chunk], to_bytes: int | None = None) -> None:
        """End the loads of an update, let these chunks leave the device, and drop free slots as `release` says."""
        slots = self._slots
        for chunk in chunks:
            chunk.give_up(slots)
        slots.shrink(to_bytes)
        self._pending, self._loads_gradients = None, False

    def _write_back_all(self) -> None:
        """Queue the write back of every chunk that is on the device alone."""
        for chunk in self.chunks:
            if chunk.where == "device":
                chunk.give_up(self._slots)

    def _synchronize(self) -> None:
        """Write back every chunk that is on the device alone, and wait for the copies."""
        self._write_back_all()
        self._slots.streams.synchronize()
