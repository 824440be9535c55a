"""A group's pieces on the device: those that are loaded for an update, and those that stay until the next.

A piece that stays was stepped in its slot and is not written back yet: it owes its copies to where it waits. They are
made when its slot is given up, or when somebody asks for what waits.
"""

from collections.abc import Mapping, Sequence

import torch

from slivertune.core.copy_streams import Event
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.loaded_piece import LoadedPiece


class DevicePieces:
    """Which pieces of a group lie in slots, by index."""

    def __init__(self) -> None:
        self.loaded: dict[int, LoadedPiece] = {}
        """What was loaded for the update at hand or stayed until it, and is not stepped yet."""
        self.stored: dict[int, Event] = {}
        """When a piece has been written back."""
        self._staying: dict[int, LoadedPiece] = {}

    def begin_update(self) -> None:
        """What has stayed until now is loaded."""
        self.loaded, self._staying = self._staying, {}

    def num_staying(self, *, beside: int | None = None) -> int:
        """Pieces that stay, or have stayed until the update at hand and are not stepped yet.

        Args:
            beside: A piece that does not count.
        """
        have_stayed = (index for index, piece in self.loaded.items() if piece.owed is not None and index != beside)
        return len(self._staying) + sum(1 for _ in have_stayed)

    def stay(
        self,
        index: int,
        owed: list[tuple[torch.Tensor, torch.Tensor]],
        waiting: Sequence[Mapping[str, torch.Tensor]],
        slots: DeviceSlots,
    ) -> None:
        """Let a piece stay that was stepped in its slot.

        Args:
            index: The piece's.
            owed: The copies to where it waits: source, target.
            waiting: For each slice, where its tensors wait. Those that the optimizer has dropped would not come again.
            slots: Of its device.
        """
        piece = self.loaded.pop(index)
        piece.tensors = [
            {key: tensor for key, tensor in on_device.items() if key in of_slice}
            for on_device, of_slice in zip(piece.tensors, waiting, strict=True)
        ]
        piece.owed, piece.gradients, piece.ready = owed, None, slots.streams.record()
        self._staying[index] = piece

    def give_up_loaded(self, slots: DeviceSlots) -> None:
        """Give back the slots of what is not stepped, also where an error has left a piece half stepped."""
        for index, piece in self.loaded.items():
            self._give_up(index, piece, slots)
        self.loaded = {}

    def give_up_staying(self, slots: DeviceSlots) -> None:
        """Give back the slots of what stays."""
        for index, piece in self._staying.items():
            self._give_up(index, piece, slots)
        self._staying = {}

    def settle(self, slots: DeviceSlots) -> None:
        """Let what waits be what the last step has left, and be there; nothing stays."""
        self.give_up_staying(slots)
        for index, piece in self.loaded.items():
            if piece.owed is not None:
                self._write_back(index, piece, slots)
        slots.streams.synchronize()

    def reorder(self, order: Sequence[int]) -> None:
        """Follow the group's pieces into another order, in which nothing is loaded.

        Args:
            order: Their indices before.
        """
        self.stored = {place: self.stored[index] for place, index in enumerate(order) if index in self.stored}
        self._staying = {place: self._staying[index] for place, index in enumerate(order) if index in self._staying}

    def discard(self, slots: DeviceSlots) -> None:
        """Give back all slots; nothing is written back."""
        slots.streams.synchronize()
        for piece in (*self._staying.values(), *self.loaded.values()):
            piece.owed = None
        self.give_up_staying(slots)
        self.give_up_loaded(slots)
        self.stored = {}

    def _give_up(self, index: int, piece: LoadedPiece, slots: DeviceSlots) -> None:
        if piece.owed is not None:
            self._write_back(index, piece, slots)
            slots.give_back(piece.slot, self.stored[index])
            return
        slots.streams.compute_after(piece.ready)
        slots.give_back(piece.slot, slots.streams.record())

    def _write_back(self, index: int, piece: LoadedPiece, slots: DeviceSlots) -> None:
        with slots.streams.on("outbound", slots.streams.record(), piece.ready):
            for source, target in piece.owed or ():
                target.copy_(source, non_blocking=True)
            self.stored[index] = slots.streams.record("outbound")
        piece.owed = None
