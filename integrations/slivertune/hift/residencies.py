"""Choose the owner of each group's state."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.disk import Disk
from slivertune.hift.offload_buffer import host_buffer, mapped_buffer
from slivertune.hift.piece import Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import ResidentGroup
from slivertune.hift.streamed import StreamedGroup


def residencies_of(
    groups: Sequence[Sequence[Weight]], meter: StepMeter, slots_of: Callable[[torch.device], DeviceSlots]
) -> tuple[Sequence[ResidentGroup], Disk | None]:
    """Build the owners of all groups' masters and state, by HiFT's settings.

    If weights are sharded, files are memory-mapped, and each rank's copies wait for the disk.

    Args:
        groups: Trained weights of each group, by index.
        meter: Meter that knows HiFT's settings.
        slots_of: Function that returns the slots of a device, which all groups on it share.

    Returns:
        Owners by index, and the `Disk` that they share if their state is stored in files of their own, else None.
    """
    config = meter.config
    if config.state == "device":
        return [ResidentGroup(weights, meter) for weights in groups], None
    if config.state != "disk":
        return [StreamedGroup(weights, meter, slots_of, host_buffer) for weights in groups], None
    if any(weight.trained is not weight.parameter for weights in groups for weight in weights):
        folder = Path(config.state_dir or ".")
        return [StreamedGroup(each, meter, slots_of, lambda streams: mapped_buffer(folder)) for each in groups], None
    disk = Disk(config)
    owners = [
        StreamedGroup(weights, meter, slots_of, partial(disk.new_buffer, group)) for group, weights in enumerate(groups)
    ]
    return owners, disk
