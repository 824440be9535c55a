"""Places of groups' masters and optimizer state: one builder for each, in a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slivertune.core.copy_streams import CopyStreams
from slivertune.hift.chunk import Weight
from slivertune.hift.disk import Disk
from slivertune.hift.group_state import GroupState, ResidentState
from slivertune.hift.offload_buffer import StateStore, host_buffer, mapped_buffer
from slivertune.hift.offloaded_state import OffloadedState
from slivertune.hift.prefetch import Prefetcher
from slivertune.hift.probe import StepMeter


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Groups whose state is to be stored, and what their owners share."""

    weights: Sequence[Sequence[Weight]]
    """Trained weights by group."""
    meter: StepMeter
    """Meter of the base optimizer's steps, with HiFT's settings."""
    prefetcher: Prefetcher
    """Owner of the devices' slots and copy streams."""
    sizes: Callable[[], list[int]]
    """Function that returns the bytes of each group's masters and state."""
    coming: Sequence[int]
    """All groups in the order of their next turns."""


States = tuple[Sequence[GroupState], Disk | None]
"""Owners of all groups' state, and the `Disk` that they share if each has a file."""


def offloaded(groups: Groups, new_store: Callable[[int, CopyStreams], StateStore]) -> Sequence[GroupState]:
    """Build the owners of state that passes through the device in chunks.

    Args:
        groups: Groups.
        new_store: Function that makes a group's store, given its index and the streams that copy to and from it.
    """
    return [
        OffloadedState(weights, groups.meter, groups.prefetcher.slots_of, partial(new_store, group))
        for group, weights in enumerate(groups.weights)
    ]


def _on_device(groups: Groups) -> States:
    return [ResidentState(weights, groups.meter) for weights in groups.weights], None


def _on_host(groups: Groups) -> States:
    return offloaded(groups, lambda group, streams: StateStore(streams.device, host_buffer(streams))), None


def _on_disk(groups: Groups) -> States:
    """If weights are sharded, files are memory-mapped, and each rank's copies wait for the disk."""
    config = groups.meter.config
    if any(weight.trained is not weight.parameter for weights in groups.weights for weight in weights):
        folder = Path(config.state_dir or ".")
        return offloaded(groups, lambda group, streams: StateStore(streams.device, mapped_buffer(folder))), None
    disk = Disk(config, groups.sizes, groups.coming)

    def new_store(group: int, streams: CopyStreams) -> StateStore:
        return StateStore(streams.device, host_buffer(streams), disk.lend(group, streams))

    return offloaded(groups, new_store), disk


STATE_PLACES: dict[str, Callable[[Groups], States]] = {
    "device": _on_device,
    "host": _on_host,
    "discard": _on_host,
    "disk": _on_disk,
}
"""Builders by `HiFTConfig.state`."""
