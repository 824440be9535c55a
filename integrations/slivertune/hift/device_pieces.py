"""A group's pieces on the device: those that are loaded for an update, and those that stay until the next.

A piece that stays was stepped in its slot and is not written back yet: it owes its copies to where it waits. They are
made when its slot is given up, or when somebody asks for what waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slivertune.core.copy_streams import Event
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.loaded_piece import Copies, LoadedPiece

PASSING_PIECES = 3
"""Slots left to the others where pieces stay: one is loaded while one is stepped and one is written back."""


@dataclass(slots=True, eq=False)
class DevicePieces:
    """Which pieces of a group lie in slots, by index."""

    loaded: dict[int, LoadedPiece] = field(default_factory=dict)
    """What was loaded for the update at hand or has stayed until it, and is not stepped yet."""
    staying: dict[int, LoadedPiece] = field(default_factory=dict)
    """What was stepped, and stays until the next update."""
    stored: dict[int, Event] = field(default_factory=dict)
    """When a piece has been written back."""


def begin_update(pieces: DevicePieces) -> None:
    """What has stayed until now is loaded."""
    pieces.loaded, pieces.staying = pieces.staying, {}


def num_staying(pieces: DevicePieces, *, beside: int | None = None) -> int:
    """Pieces that stay, or have stayed until the update at hand and are not stepped yet.

    Args:
        pieces: The group's.
        beside: Index of one that does not count.
    """
    have_stayed = [index for index, piece in pieces.loaded.items() if piece.owed is not None and index != beside]
    return len(pieces.staying) + len(have_stayed)


def may_stay(pieces: DevicePieces, index: int, num_pieces: int, num_slots: int) -> bool:
    """Whether there is room for a piece until the next update, and for the others to pass.

    Args:
        pieces: The group's.
        index: The piece's.
        num_pieces: Of the group.
        num_slots: That there is room for.
    """
    if num_slots >= num_pieces:
        return True
    most = num_slots - PASSING_PIECES
    if most <= 0 or num_staying(pieces, beside=index) >= most:
        return False
    passing = num_pieces - most  # spread evenly, so that the bus always has something to do
    return index * passing // num_pieces == (index + 1) * passing // num_pieces


def let_stay(
    pieces: DevicePieces,
    index: int,
    owed: Copies,
    waiting: Sequence[Mapping[str, torch.Tensor]],
    slots: DeviceSlots,
) -> None:
    """Let a piece stay that was stepped in its slot.

    Args:
        pieces: The group's.
        index: The piece's.
        owed: The copies to where it waits: source, target.
        waiting: For each slice, where its tensors wait. Those that the optimizer has dropped would not come again.
        slots: Of its device.
    """
    piece = pieces.loaded.pop(index)
    piece.tensors = [
        {key: tensor for key, tensor in on_device.items() if key in of_slice}
        for on_device, of_slice in zip(piece.tensors, waiting, strict=True)
    ]
    piece.owed, piece.gradients, piece.ready = owed, None, slots.streams.record()
    pieces.staying[index] = piece


def give_up_loaded(pieces: DevicePieces, slots: DeviceSlots) -> None:
    """Give back the slots of what is not stepped, also where an error has left a piece half stepped."""
    for index, piece in pieces.loaded.items():
        _give_up(pieces, index, piece, slots)
    pieces.loaded = {}


def give_up_staying(pieces: DevicePieces, slots: DeviceSlots) -> None:
    """Give back the slots of what stays."""
    for index, piece in pieces.staying.items():
        _give_up(pieces, index, piece, slots)
    pieces.staying = {}


def settle(pieces: DevicePieces, slots: DeviceSlots) -> None:
    """Let what waits be what the last step has left, and be there; nothing stays."""
    give_up_staying(pieces, slots)
    for index, piece in pieces.loaded.items():
        if piece.owed is not None:
            _pay(pieces, index, piece, slots)
    slots.streams.synchronize()


def reorder(pieces: DevicePieces, order: Sequence[int]) -> None:
    """Follow the group's pieces into another order; nothing is loaded.

    Args:
        pieces: The group's.
        order: Their indices before.
    """
    pieces.stored = {place: pieces.stored[index] for place, index in enumerate(order) if index in pieces.stored}
    pieces.staying = {place: pieces.staying[index] for place, index in enumerate(order) if index in pieces.staying}


def forget_owed(pieces: DevicePieces) -> None:
    """Nothing is to be written back, and nothing has been."""
    for piece in (*pieces.staying.values(), *pieces.loaded.values()):
        piece.owed = None
    pieces.stored = {}


def write_back(pieces: DevicePieces, index: int, copies: Copies, slots: DeviceSlots, after: Event = None) -> Event:
    """Queue a piece's copies to where it waits, behind what is computed by now.

    Args:
        pieces: The group's.
        index: The piece's.
        copies: Source and target of each.
        slots: Of its device.
        after: What they wait for beside.

    Returns:
        When they are made.
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
