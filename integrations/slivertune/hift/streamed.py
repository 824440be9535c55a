"""State that waits off the device and passes through it in pieces.

Between its turns a group's state waits in an `OffloadBuffer`. In a step its pieces pass through two slots of the
device:

    inbound:    load 0, load 1 |          load 2 ...
    computing:                 | step 0   step 1    step 2 ...
    outbound:                  |          store 0   store 1 ...

The first two loads start when the group's first gradient arrives, so they run beside the backward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.cutting import cut_group
from slivertune.hift.masters import join_master, refresh_master
from slivertune.hift.nested_state import unflatten_state
from slivertune.hift.offload_buffer import (
    LOW,
    TIES,
    OffloadBuffer,
    OffloadedState,
    aligned,
    disk_buffer,
    host_buffer,
    tensor_at,
    waiting_bytes,
)
from slivertune.hift.piece import OwnHyperparameters, ParamGroups, Slice, Weight
from slivertune.hift.residency import MASTER, ResidentGroup, WeightState
from slivertune.hift.rotation import LearningRate

Direction = Literal["inbound", "outbound"]
Event = torch.cuda.Event | None
"""A moment on a stream; None where there are no streams."""
Loaded = list[dict[str, torch.Tensor]]
"""For each slice of a piece, its tensors on the device by key."""


class StreamedGroup(ResidentGroup):
    """A group whose masters and state wait in an offload buffer; called as `ResidentGroup` is.

    On the device there are at most two pieces at a time, each of at most `stream_bytes` with its temporaries.

    Copies run on two side streams on CUDA, one into the device and one out of it; in plain order elsewhere.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turn: list[str] = []
        """Weights stepped since `end`, in the order in which their gradients came."""
        self._is_first_turn = False
        self._offloaded: OffloadedState | None = None
        self._offloaded_from = torch.device("cpu")
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        self._slots: list[torch.Tensor] = []
        self._loaded: dict[int, Loaded] = {}
        self._ready: dict[int, Event] = {}
        self._stored: dict[int, Event] = {}
        self._left: dict[int, Event] = {}
        """By slot: when what was in it last has left."""

    @override
    def prefetch(self) -> None:
        self._follow_the_model()
        if self._offloaded is not None and not self._loaded:
            self._pieces = self._pieces or cut_group(self.weights, self._meter)
            self._load_two(0)

    @override
    def begin(self) -> None:
        self._follow_the_model()
        self._pieces = self._pieces or cut_group(self.weights, self._meter)
        if self._offloaded is None:
            offloaded = self._new_state()
            offloaded.buffer.reserve(waiting_bytes(self.weights, self._meter))
            self._offloaded, self._offloaded_from = offloaded, self._device()
            self._is_first_turn = True

    @override
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        names = {weight.name: None for weight in weights}
        own = [index for index, piece in enumerate(self._pieces) if piece.slices[0].weight.name in names]
        if own and own[0] not in self._loaded and not self._is_first_turn:
            # Not the weight that was expected: what was loaded for that one gives way.
            self._loaded.clear()
            self._load_two(own[0])
        self._turn += names
        try:
            for index in own:
                self._step_piece(index, param_groups, held_lr)
                self._store(index)
                if self._loaded and index + 2 < len(self._pieces):
                    self._load(index + 2)
        except BaseException:
            self._empty_slots_after_copies()
            raise
        for weight in weights:
            weight.parameter.grad = None

    @override
    def end(self) -> None:
        self._empty_slots_after_copies()
        # Gradients come in nearly the same order every time, so the next pieces can be loaded ahead.
        expected = {name: place for place, name in enumerate(self._turn)}
        self._pieces.sort(key=lambda piece: expected.get(piece.slices[0].weight.name, len(expected)))
        self._turn = []

    def _empty_slots_after_copies(self) -> None:
        # Before the slots' memory is used again, also where an error leaves loads that no one waited for.
        for record in (*self._ready.values(), *self._stored.values()):
            self._compute_after(record)
        self._empty_slots()
        self._is_first_turn = False

    @override
    def export(self) -> dict[str, WeightState]:
        if self._offloaded is None:
            return {}
        self._synchronize()
        return self._offloaded.export(self.weights)

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        if state:
            offloaded = self._new_state()
            offloaded.restore(self.weights, state)
            self._offloaded, self._offloaded_from = offloaded, self._device()
        self._restored_own = own

    @override
    def discard(self) -> None:
        self._synchronize()
        self._empty_slots()
        super().discard()
        self._turn = []
        self._offloaded = None

    def _follow_the_model(self) -> None:
        """Take the state along if the model has moved to another device since: only for that is its memory right."""
        if self._offloaded is not None and self._offloaded_from != self._device():
            state, own = self.export(), self.own_hyperparameters()
            self.discard()
            self._streams = {}
            self.restore(state, own)

    def _device(self) -> torch.device:
        devices = {weight.parameter.device for weight in self.weights}
        if len(devices) > 1:
            raise ValueError(
                f"a group's weights lie on {sorted(map(str, devices))}; a group must lie on one device: "
                "lower layers_per_group, or move the model"
            )
        return devices.pop()

    def _make_buffer(self) -> OffloadBuffer:
        config = self._meter.config
        return disk_buffer(Path(config.state_dir or ".")) if config.state == "disk" else host_buffer(self._device())

    def _new_state(self) -> OffloadedState:
        return OffloadedState(self._make_buffer(), split=self._meter.config.master == "split")

    @contextmanager
    def _on(self, direction: Direction, *after: Event) -> Iterator[None]:
        """Queue what is done inside on a side stream, to start after these moments."""
        if self._offloaded_from.type != "cuda":
            yield
            return
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self._offloaded_from)
        stream = self._streams[direction]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def _record(self, direction: Direction | None = None) -> Event:
        """The moment at which what is queued now on a side stream (None: the computing stream) is done."""
        device = self._offloaded_from
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device) if direction is None else self._streams[direction]
        event: torch.cuda.Event = stream.record_event()
        return event

    def _compute_after(self, event: Event) -> None:
        """Let later work of the computing stream start after a moment."""
        if event is not None:
            torch.cuda.current_stream(self._offloaded_from).wait_event(event)

    def _synchronize(self) -> None:
        """Wait on the host until both side streams are empty."""
        for stream in self._streams.values():
            stream.synchronize()

    # One piece through the device.

    def _load(self, index: int) -> None:
        """Queue the copies of a piece's waiting tensors into its slot."""
        assert self._offloaded is not None
        offloaded = [self._offloaded.tensors_of(one) for one in self._pieces[index].slices]
        if not self._slots:
            self._slots = [self._new_slot() for _ in range(min(2, len(self._pieces)))]
        slot, start = self._slots[index % 2], 0
        loaded: Loaded = []
        with self._on("inbound", self._record(), self._left.get(index % 2)):
            for tensors in offloaded:
                on_device = {}
                for key, source in tensors.items():
                    on_device[key] = tensor_at(slot, start, source).copy_(source, non_blocking=True)
                    start += aligned(source.nbytes)
                loaded.append(on_device)
            self._ready[index] = self._record("inbound")
        self._loaded[index] = loaded

    def _load_two(self, first: int) -> None:
        for index in range(first, min(first + 2, len(self._pieces))):
            self._load(index)

    def _new_slot(self) -> torch.Tensor:
        assert self._offloaded is not None
        num_bytes = max(
            sum(aligned(tensor.nbytes) for one in piece.slices for tensor in self._offloaded.tensors_of(one).values())
            for piece in self._pieces
        )
        with claimed_at_birth("state"):
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=self._device())
        claim(slot, "state")
        return slot

    def _step_piece(self, index: int, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Put a piece's leaves and state on what was loaded, or make its masters; and step it."""
        assert self._offloaded is not None
        piece = self._pieces[index]
        self._compute_after(self._ready.pop(index, None))
        states = []
        for position, one in enumerate(piece.slices):
            tensors = dict(self._loaded[index][position]) if index in self._loaded else {}
            scalars = self._offloaded.scalars_of(one)
            data = _leaf_data(one, tensors, scalars)
            if one.on_master and not self._is_first_turn:
                refresh_master(data, one.part_of_weight())
            one.place_leaf(data)
            one.attach_gradient()
            states.append(unflatten_state({**tensors, **scalars}))
        instance = piece.instance or piece.build(self._meter.base, param_groups, self._restored_own)
        # An empty state leaves what the constructor made.
        instance.optimizer.state.update(
            {one.leaf: state for one, state in zip(piece.slices, states, strict=True) if state}
        )
        instance.push(param_groups, held_lr)
        instance.optimizer.step()

    def _store(self, index: int) -> None:
        """Write a piece's weights back, queue the copies of its tensors to where they wait, and release it."""
        piece = self._pieces[index]
        assert self._offloaded is not None
        assert piece.instance is not None
        self._loaded.pop(index, None)
        slots = {slot.untyped_storage().data_ptr() for slot in self._slots}
        leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for one in piece.slices:
            state = piece.instance.optimizer.state.pop(one.leaf, {})
            if one.on_master:
                one.part_of_weight().copy_(one.leaf.data)
                state[MASTER] = one.leaf.data
            leaving += self._offloaded.receive(one, state)
            one.drop_gradient()
            one.place_leaf(torch.empty(0, dtype=one.leaf.dtype))
        with self._on("outbound", self._record()):
            for source, target in leaving:
                target.copy_(source, non_blocking=True)
            self._stored[index] = self._left[index % 2] = self._record("outbound")
        if any(source.untyped_storage().data_ptr() not in slots for source, _ in leaving):
            self._compute_after(self._stored[index])  # before the memory of new tensors is used again

    def _empty_slots(self) -> None:
        for held in (self._slots, self._loaded, self._ready, self._stored, self._left):
            held.clear()


def _leaf_data(one: Slice, tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> torch.Tensor:
    """What a leaf lies on; takes the master out of the state."""
    part = one.part_of_weight()
    if not one.on_master:
        return part
    low, ties = tensors.pop(LOW, None), scalars.pop(TIES, None)
    if MASTER in tensors:
        return tensors.pop(MASTER)
    if low is not None and ties is not None:
        master = join_master(part, low, ties.to(part.device))
    else:
        with claimed_at_birth("state"):
            master = part.to(torch.float32)  # the group's first turn
    claim(master, "state")
    return master
