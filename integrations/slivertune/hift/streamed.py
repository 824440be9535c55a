"""State that waits off the device and passes through it in pieces.

Between its turns a group's state waits in an `OffloadBuffer`. In a step its pieces pass through two slots of the
device:

    inbound:    load 0, load 1 |          load 2 ...
    computing:                 | step 0   step 1    step 2 ...
    outbound:                  |          store 0   store 1 ...

The first two loads start when the group's first gradient arrives, so they run beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import MasterKind
from slivertune.hift.copy_streams import CopyStreams, Event
from slivertune.hift.masters import refresh_master
from slivertune.hift.nested_state import unflatten_state
from slivertune.hift.offload_buffer import Arena, OffloadBuffer, aligned
from slivertune.hift.offloaded_state import LOW, TIES, OffloadedState
from slivertune.hift.piece import Piece, Slice, Weight
from slivertune.hift.piece_cutter import PieceCutter
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import (
    MASTER,
    OwnHyperparameters,
    ParamGroups,
    Residency,
    WeightState,
    common_hyperparameters,
)
from slivertune.hift.rotation import LearningRate
from slivertune.hift.split import join_master

Loaded = list[dict[str, torch.Tensor]]
"""For each slice of a piece, its tensors on the device by key."""


class StreamedGroup(Residency):
    """A group whose masters and state wait in an offload buffer; see `Residency`.

    On the device there are at most two pieces at a time, each of at most `stream_bytes` with its temporaries.

    Args:
        weights: What the group trains; all on one device.
        base: The base optimizer; one instance a piece.
        meter: Measures its steps.
        master: What stands behind 16-bit weights.
        stream_bytes: Bytes of a piece on the device; 0 for the whole group.
        make_buffer: Makes the place to wait, for state that computes on a device.
        reserve_always: Whether all bytes must be allocated before the group's first update (files), even where that
            takes an extra step on a dummy weight.
        by_weight: Whether `step_weight` is used, and not `step`; no piece holds slices of two weights then.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        base: BaseOptimizer,
        meter: StepMeter,
        *,
        master: MasterKind,
        stream_bytes: int,
        make_buffer: Callable[[torch.device], OffloadBuffer],
        reserve_always: bool,
        by_weight: bool = False,
    ) -> None:
        self._weights = tuple(weights)
        self._base = base
        self._master = master
        self._cutter = PieceCutter(
            self._weights, base, meter, master=master, stream_bytes=stream_bytes, by_weight=by_weight
        )
        self._make_buffer = make_buffer
        self._reserve_always = reserve_always
        self._pieces: list[Piece] = []
        self._turn: list[str] = []
        """Weights stepped by `step_weight` since `end_weights`, in the order in which their gradients came."""
        self._is_first_turn = False
        self._offloaded: OffloadedState | None = None
        self._offloaded_from: torch.device | None = None
        self._restored_own: OwnHyperparameters = {}
        self._pending_own: set[int] = set()
        """Pieces, by identity, whose instance has not got `_restored_own` yet."""
        self._streams: CopyStreams | None = None
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
            pieces = self._cut()
            for index in range(min(2, len(pieces))):
                self._load(index)

    @override
    def step(self, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        pieces = self._begin()
        if not self._is_first_turn:
            self.prefetch()
        try:
            self._run(range(len(pieces)), param_groups, held_lr)
        finally:
            self._end()

    @override
    def begin_weights(self) -> None:
        self._begin()

    @override
    def step_weight(self, weight: Weight, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        pieces = self._pieces
        own = [index for index, piece in enumerate(pieces) if piece.slices[0].weight is weight]
        if own and own[0] not in self._loaded and not self._is_first_turn:
            # Not the weight that was expected: what was loaded for that one gives way.
            self._loaded.clear()
            for index in range(own[0], min(own[0] + 2, len(pieces))):
                self._load(index)
        self._turn.append(weight.name)
        try:
            self._run(own, param_groups, held_lr)
        except BaseException:
            self._end()
            raise
        weight.parameter.grad = None

    @override
    def end_weights(self) -> None:
        self._end()
        # Gradients come in nearly the same order every time, so the next pieces can be loaded ahead.
        expected = {name: place for place, name in enumerate(self._turn)}
        self._pieces.sort(key=lambda piece: expected.get(piece.slices[0].weight.name, len(expected)))
        self._turn = []

    def _begin(self) -> list[Piece]:
        """Make ready to step pieces; the first time in a turn, find room for what will wait."""
        self._follow_the_model()
        pieces = self._cut()
        if self._offloaded is None:
            self._offloaded, self._offloaded_from = self._reserved(), self._device()
            self._is_first_turn = True
        return pieces

    def _run(self, indices: Sequence[int], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        for index in indices:
            self._place(index, param_groups)
            self._pieces[index].step(param_groups, held_lr)
            self._store(index)
            if self._loaded and index + 2 < len(self._pieces):
                self._load(index + 2)

    def _end(self) -> None:
        # Before the slots' memory is used again, also where an error leaves loads that no one waited for.
        for record in (*self._ready.values(), *self._stored.values()):
            self._copy_streams().compute_after(record)
        self._empty_slots()
        self._is_first_turn = False

    @override
    def export(self) -> dict[str, WeightState]:
        if self._offloaded is None:
            return {}
        self._copy_streams().synchronize()
        return self._offloaded.export(self._weights)

    @override
    def own_hyperparameters(self) -> OwnHyperparameters:
        return common_hyperparameters(self._pieces, self._base.name) or self._restored_own

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        if state:
            offloaded = OffloadedState(self._make_buffer(self._device()), split=self._master == "split")
            offloaded.restore(self._weights, state)
            self._offloaded, self._offloaded_from = offloaded, self._device()
        self._restored_own = own

    @override
    def discard(self) -> None:
        if self._streams is not None:
            self._streams.synchronize()
        self._empty_slots()
        self._pieces = []
        self._turn = []
        self._offloaded = None
        self._restored_own = {}

    def _follow_the_model(self) -> None:
        """Take the state along if the model has moved to another device since: only for that is its memory right."""
        if self._offloaded is not None and self._offloaded_from != self._device():
            state, own = self.export(), self.own_hyperparameters()
            self.discard()
            self._streams = None
            self.restore(state, own)

    def _device(self) -> torch.device:
        devices = {weight.parameter.device for weight in self._weights}
        if len(devices) > 1:
            raise ValueError(
                f"a group's weights lie on {sorted(map(str, devices))}; a group must lie on one device: "
                "lower layers_per_group, or move the model"
            )
        return devices.pop()

    def _copy_streams(self) -> CopyStreams:
        if self._streams is None:
            self._streams = CopyStreams(self._device())
        return self._streams

    def _cut(self) -> list[Piece]:
        if not self._pieces:
            self._pieces = self._cutter.cut()
            self._pending_own = {id(piece) for piece in self._pieces}
        return self._pieces

    def _reserved(self) -> OffloadedState:
        """A place to wait, with room for all that is known to come."""
        buffer = self._make_buffer(self._device())
        buffer.reserve(self._cutter.waiting_bytes(self._reserve_always))
        return OffloadedState(buffer, split=self._master == "split")

    # One piece through the device.

    def _load(self, index: int) -> None:
        """Queue the copies of a piece's waiting tensors into its slot."""
        assert self._offloaded is not None
        offloaded = [self._offloaded.tensors_of(one) for one in self._pieces[index].slices]
        if not self._slots:
            self._slots = [self._new_slot() for _ in range(min(2, len(self._pieces)))]
        streams = self._copy_streams()
        slot = Arena(self._slots[index % 2])
        loaded: Loaded = []
        with streams.on("inbound", streams.record(), self._left.get(index % 2)):
            for tensors in offloaded:
                on_device = {}
                for key, source in tensors.items():
                    target = slot.empty_like(source)
                    assert target is not None, "a slot has room for the largest piece"
                    on_device[key] = target.copy_(source, non_blocking=True)
                loaded.append(on_device)
            self._ready[index] = streams.record("inbound")
        self._loaded[index] = loaded

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

    def _place(self, index: int, param_groups: ParamGroups) -> None:
        """Put a piece's leaves and state on what was loaded, or make its masters."""
        assert self._offloaded is not None
        piece = self._pieces[index]
        self._copy_streams().compute_after(self._ready.pop(index, None))
        states = []
        for position, one in enumerate(piece.slices):
            tensors = dict(self._loaded[index][position]) if index in self._loaded else {}
            scalars = self._offloaded.scalars_of(one, self._cutter.scalars_on_device(one.weight))
            data = _leaf_data(one, tensors, scalars)
            if one.on_master and not self._is_first_turn:
                refresh_master(data, one.part_of_weight())
            one.place_leaf(data)
            one.attach_gradient()
            states.append(unflatten_state({**tensors, **scalars}))
        for one, state in zip(piece.slices, states, strict=True):
            piece.put_state(param_groups, one, state)
        if self._restored_own and id(piece) in self._pending_own:
            piece.restore_hyperparameters(param_groups, self._restored_own)
            self._pending_own.discard(id(piece))
            if not self._pending_own:
                self._restored_own = {}

    def _store(self, index: int) -> None:
        """Write a piece's weights back, queue the copies of its tensors to where they wait, and release it."""
        assert self._offloaded is not None
        piece, streams = self._pieces[index], self._copy_streams()
        self._loaded.pop(index, None)
        slots = {slot.untyped_storage().data_ptr() for slot in self._slots}
        leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for one in piece.slices:
            state = piece.take_state(one)
            if one.on_master:
                one.part_of_weight().copy_(one.leaf.data)
                state[MASTER] = one.leaf.data
            leaving += [(source, target) for _, source, target in self._offloaded.receive(one, state)]
            one.drop_gradient()
            one.clear_leaf()
        with streams.on("outbound", streams.record()):
            for source, target in leaving:
                target.copy_(source, non_blocking=True)
            self._stored[index] = self._left[index % 2] = streams.record("outbound")
        if any(source.untyped_storage().data_ptr() not in slots for source, _ in leaving):
            streams.compute_after(self._stored[index])  # before the memory of new tensors is used again

    def _empty_slots(self) -> None:
        self._slots = []
        self._loaded = {}
        self._ready = {}
        self._stored = {}
        self._left = {}


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
