"""Which owner each group's state gets."""

from collections.abc import Callable, Sequence

import torch

from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.disk_group import DiskGroup
from slivertune.hift.disk_state import DiskState
from slivertune.hift.piece import Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import ResidentGroup
from slivertune.hift.streamed import StreamedGroup


def residencies_of(
    groups: Sequence[Sequence[Weight]], meter: StepMeter, slots_of: Callable[[torch.device], DeviceSlots]
) -> tuple[list[ResidentGroup], DiskState | None]:
    """Make the owners of all groups' masters and state, by HiFT's settings.

    Where weights are sharded, files are memory-mapped, and each rank's copies wait for the disk.

    Args:
        groups: What each trains, by index.
        meter: Knows the settings.
        slots_of: Gives the slots of a device, which all groups on it share.

    Returns:
        The owners by index; and what they have in common where their state waits in files of their own.
    """
    if meter.config.state == "device":
        return [ResidentGroup(weights, meter) for weights in groups], None
    is_sharded = any(weight.trained is not weight.parameter for weights in groups for weight in weights)
    if meter.config.state != "disk" or is_sharded:
        return [StreamedGroup(weights, meter, slots_of) for weights in groups], None
    disk = DiskState(meter.config, meter)
    disk.groups = [DiskGroup(weights, meter, slots_of, disk) for weights in groups]
    return list(disk.groups), disk
