"""A chunk in its slot on the device, with everything that a step reads and writes there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slivertune.core.copy_streams import Event
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.torch_internals import storage_key
from slivertune.hift.device_slots import Slot
from slivertune.hift.offload_buffer import Copy
from slivertune.hift.piece import Slice
from slivertune.hift.residency import MASTER

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Copies to make: source and target of each."""


@dataclass(slots=True)
class LoadedPiece:
    """A chunk in its slot."""

    slot: Slot
    tensors: list[dict[str, torch.Tensor]]
    """Tensors on the device by key, for each slice."""
    num_bytes: int
    """Bytes of the slot that they take. Parts of gradients follow."""
    ready: Event
    """Event after which all of them have arrived."""
    gradients: list[torch.Tensor | None] | None = None
    """Parts of offloaded gradients, one per slice, once they are loaded."""
    owed: Copies | None = None
    """Pending write back, which is not made because the group is stepped again."""


def moved_to_slot(copies: Sequence[Copy], loaded: Mapping[str, torch.Tensor]) -> tuple[Sequence[Copy], bool]:
    """Copy new tensors of a step over the old ones in the slot, so that they are written back from there.

    Returns:
        Copies out of the slot, and True. If a tensor has no place there, the given copies, and False.
    """
    places = {key: _place_of(tensor) for key, tensor in loaded.items()}
    for key, value, _ in copies:
        place = loaded.get(key)
        if place is None or (place.shape, place.dtype) != (value.shape, value.dtype):
            return copies, False
        if _place_of(value) != places[key] and _place_of(value) in places.values():
            return copies, False  # the optimizer has exchanged the places of two tensors
    made = [(key, value) for key, value, _ in copies if _place_of(value) != places[key]]
    for key, value in made:
        loaded[key].copy_(value)
    return [(key, loaded[key], target) for key, _, target in copies], True


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's storage and address. Without data, addresses count from the beginning of the storage."""
    return storage_key(tensor.untyped_storage()), tensor.data_ptr()


def leaf_data(one: Slice, part: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the data of a leaf: its part of the weight, an fp32 copy, or the master, taken out of the state."""
    if one.is_rounded:
        return part.to(torch.float32)
    if not one.on_master:
        return part
    if MASTER in tensors:
        return tensors.pop(MASTER)
    with claimed_at_birth("state"):
        master = part.to(torch.float32)  # the group's first turn
    claim(master, "state")
    return master
