"""A place of HiFT's state that the library does not have: the memory of another device."""

import torch

from slivertune.core.copy_streams import CopyStreams
from slivertune.hift.offload_buffer import OffloadBuffer, StateStore
from slivertune.hift.state_places import Groups, States, offloaded

DEVICE = {"state": torch.device("cpu")}
"""The other device, set by a test."""


def on_second_device(groups: Groups) -> States:
    """Store all groups' masters and state there, between their turns."""

    def new_store(group: int, streams: CopyStreams) -> StateStore:
        def allocate(num_bytes: int) -> torch.Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE["state"])

        return StateStore(streams.device, OffloadBuffer("device", allocate))

    return offloaded(groups, new_store), None
