"""Resident chunks of a group: those loaded for an update, and those that stay until the next.

A chunk that stays was stepped in its slot and is not written back yet. It is written back when its slot is given up, or
when its offloaded copy is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slivertune.core.copy_streams import Event
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.loaded_piece import Copies, LoadedPiece

PASSING_PIECES = 3
"""Slots left to the other chunks if some stay resident: one loads, one is stepped, one is written back."""


@dataclass(slots=True, eq=False)
class DevicePieces:
    """Chunks of a group that are in slots, by index."""

    loaded: dict[int, LoadedPiece] = field(default_factory=dict)
    """Chunks that were loaded for the current update, or stayed until it, and are not stepped yet."""
    staying: dict[int, LoadedPiece] = field(default_factory=dict)
    """Chunks that were stepped, and stay resident until the next update."""
    stored: dict[int, Event] = field(default_factory=dict)
    """Events after which chunks are written back."""


def begin_update(pieces: DevicePieces) -> None:
    """Make the chunks that stayed resident until this update its loaded ones."""
    pieces.loaded, pieces.staying = pieces.staying, {}


def num_staying(pieces: DevicePieces, *, beside: int | None = None) -> int:
    """Count the chunks that stay resident, or stayed until the current update and are not stepped yet.

    Args:
        pieces: Chunks of the group.
        beside: Index of a chunk that does not count.
    """
    have_stayed = [index for index, piece in pieces.loaded.items() if piece.owed is not None and index != beside]
    return len(pieces.staying) + len(have_stayed)


def may_stay(pieces: DevicePieces, index: int, num_pieces: int, num_slots: int) -> bool:
    """Return whether a chunk may stay until the next update, with room for the others to pass.

    Args:
        pieces: Chunks of the group.
        index: Index of the chunk.
        num_pieces: Number of chunks in the group.
        num_slots: Number of slots that there is room for.
    """
    if num_slots >= num_pieces:
        return True
    most = num_slots - PASSING_PIECES
    if most <= 0 or num_staying(pieces, beside=index) >= most:
        return False
    passing = num_pieces - most  # spread evenly, so that the bus stays busy
    return index * passing // num_pieces == (index + 1) * passing // num_pieces


def let_stay(
    pieces: DevicePieces,
    index: int,
    owed: Copies,
    waiting: Sequence[Mapping[str, torch.Tensor]],
    slots: DeviceSlots,
) -> None:
    """Keep a chunk resident that was stepped in its slot.

    Args:
        pieces: Chunks of the group.
        index: Index of the chunk.
        owed: Copies that write it back: source, target.
        waiting: Offloaded tensors of each slice. Others in the slot, which the optimizer has dropped, are left out.
        slots: Slots of the device.
    """
    piece = pieces.loaded.pop(index)
    piece.tensors = [
        {key: tensor for key, tensor in on_device.items() if key in of_slice}
        for on_device, of_slice in zip(piece.tensors, waiting, strict=True)
    ]
    piece.owed, piece.gradients, piece.ready = owed, None, slots.streams.record()
    pieces.staying[index] = piece


def give_up_loaded(pieces: DevicePieces, slots: DeviceSlots) -> None:
    """Give back the slots of chunks that are not stepped, even if an error has left one half stepped."""
    for index, piece in pieces.loaded.items():
        _give_up(pieces, index, piece, slots)
    pieces.loaded = {}


def give_up_staying(pieces: DevicePieces, slots: DeviceSlots) -> None:
    """Give back the slots of stepped chunks that stay resident."""
    for index, piece in pieces.staying.items():
        _give_up(pieces, index, piece, slots)
    pieces.staying = {}


def settle(pieces: DevicePieces, slots: DeviceSlots) -> None:
    """Write back every resident chunk and wait for the copies."""
    give_up_staying(pieces, slots)
    for index, piece in pieces.loaded.items():
        if piece.owed is not None:
            _pay(pieces, index, piece, slots)
    slots.streams.synchronize()


def reorder(pieces: DevicePieces, order: Sequence[int]) -> None:
    """Apply a new order of the group's chunks without loading any.

    Args:
        pieces: Chunks of the group.
        order: Previous index of each chunk, in the new order.
    """
    pieces.stored = {place: pieces.stored[index] for place, index in enumerate(order) if index in pieces.stored}
    pieces.staying = {place: pieces.staying[index] for place, index in enumerate(order) if index in pieces.staying}


def forget_owed(pieces: DevicePieces) -> None:
    """Drop all pending write backs, and forget the finished ones."""
    for piece in (*pieces.staying.values(), *pieces.loaded.values()):
        piece.owed = None
    pieces.stored = {}


def write_back(pieces: DevicePieces, index: int, copies: Copies, slots: DeviceSlots, after: Event = None) -> Event:
    """Queue the write back of a chunk behind the computation queued so far.

    Args:
        pieces: Chunks of the group.
        index: Index of the chunk.
        copies: Source and target of each copy.
        slots: Slots of the device.
        after: Another event that the copies wait for.

    Returns:
        Event after which the copies are complete.
    """
    streams = slots.streams
    with streams.on("outbound", streams.record(), after):
        for source, target in copies:
            target.copy_(source, non_blocking=True)
        stored = pieces.stored[index] = streams.record("outbound")
    return stored


def _give_up(pieces: DevicePieces, index: int, piece: LoadedPiece, slots: DeviceSlots) -> None:
    if piece.owed is not None:
        slots.give_back(piece.slot, _pay(pieces, index, piece, slots))
        return
    slots.streams.compute_after(piece.ready)
    slots.give_back(piece.slot, slots.streams.record())


def _pay(pieces: DevicePieces, index: int, piece: LoadedPiece, slots: DeviceSlots) -> Event:
    copies, piece.owed = piece.owed or (), None
    return write_back(pieces, index, copies, slots, after=piece.ready)
