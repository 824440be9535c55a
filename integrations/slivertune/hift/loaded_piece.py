"""A piece in its slot of the device, and what a step finds and leaves there."""

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
"""To be made: source and target of each."""


@dataclass(slots=True)
class LoadedPiece:
    """A piece in its slot."""

    slot: Slot
    tensors: list[dict[str, torch.Tensor]]
    """For each slice, its tensors on the device by key."""
    num_bytes: int
    """How much of the slot they take; parts of gradients lie behind."""
    ready: Event
    """When the last of them has arrived."""
    gradients: list[torch.Tensor | None] | None = None
    """For each slice, its part of a gradient that waits on the host, once it is loaded."""
    owed: Copies | None = None
    """To where it waits; not made, since its group is stepped again."""


def moved_to_slot(copies: Sequence[Copy], loaded: Mapping[str, torch.Tensor]) -> tuple[Sequence[Copy], bool]:
    """Put what a step has made anew where the old tensors lie in the slot, so that it leaves from there.

    Returns:
        The copies out of the slot, and True; or the given ones and False, where a tensor has no place there.
    """
    places = {key: _place_of(tensor) for key, tensor in loaded.items()}
    for key, value, _ in copies:
        place = loaded.get(key)
        if place is None or (place.shape, place.dtype) != (value.shape, value.dtype):
            return copies, False
        if _place_of(value) != places[key] and _place_of(value) in places.values():
            return copies, False  # the optimizer has changed two tensors' places
    made = [(key, value) for key, value, _ in copies if _place_of(value) != places[key]]
    for key, value in made:
        loaded[key].copy_(value)
    return [(key, loaded[key], target) for key, _, target in copies], True


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it lies; tensors without data have addresses that count from the beginning of their storage."""
    return storage_key(tensor.untyped_storage()), tensor.data_ptr()


def leaf_data(one: Slice, part: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a leaf lies on, its part of the weight or the master of that; takes the master out of the state."""
    if not one.on_master:
        return part
    if MASTER in tensors:
        return tensors.pop(MASTER)
    with claimed_at_birth("state"):
        master = part.to(torch.float32)  # the group's first turn
    claim(master, "state")
    return master
