"""Check that the host has room for offloaded state and gradients."""

from collections import Counter
from collections.abc import Sequence

from slivertune.core.host_memory import available_host_bytes
from slivertune.core.torch_internals import is_without_data
from slivertune.hift.disk import Disk, split_bytes
from slivertune.hift.group_state import GroupState
from slivertune.hift.offload_buffer import offloaded_bytes
from slivertune.hift.probe import StepMeter


class HostRoom:
    """Room on the host for all groups' masters and state, and for offloaded gradients.

    Args:
        groups: Owners of all groups' state. Loaded state is on the host already and needs no more room.
        meter: Meter of the memory that steps need, with HiFT's settings.
        disk: Files of the groups, if they are stored there.
    """

    def __init__(self, groups: Sequence[GroupState], meter: StepMeter, disk: Disk | None) -> None:
        self._groups, self._meter, self._disk = groups, meter, disk
        self._is_taken = False

    def take(self, gradient_bytes: int = 0) -> None:
        """Check the room before anything is allocated: once for state, and whenever gradients get memory.

        The room of the files is reserved.

        Args:
            gradient_bytes: Bytes of gradients to come.

        Raises:
            MemoryError: If there is no room, with the bytes needed and the bytes free.
            OSError: If the disk has none.
        """
        if self._is_taken and not gradient_bytes:
            return
        _check(self._groups, self._meter, self._disk, gradient_bytes)
        if self._disk is not None:
            self._disk.open()
        self._is_taken = True


def _check(groups: Sequence[GroupState], meter: StepMeter, disk: Disk | None, gradient_bytes: int) -> None:
    available = None if is_without_data() else available_host_bytes()
    if available is None:
        return
    needed: Counter[str] = Counter()
    coming = [group.weights for group in groups if not group.is_offloaded]
    if meter.config.state == "host" and coming:
        needed["masters and state"] = sum(offloaded_bytes(weights, meter).total() for weights in coming)
    if disk is not None and disk.files is None:
        sizes = [offloaded_bytes(group.weights, meter).total() for group in groups]
        host_bytes, _ = split_bytes(sizes, meter.config.state_ram_bytes)
        needed['two groups of state="disk" and those of state_ram_bytes'] = host_bytes
    if gradient_bytes:
        needed["gradients"] = gradient_bytes
    if needed.total() > available:
        parts = " and ".join(f"{num_bytes / 1e9:.1f} GB for {what}" for what, num_bytes in needed.items())
        ways = []
        if needed.keys() - {"gradients"}:
            ways.append(
                'Use state="disk" on a fast local disk with few layers per group, 8-bit state (adamw8bit), or a '
                "machine with more memory"
            )
        if gradient_bytes:
            ways.append(
                "Gradients need less with fewer layers per group, and nothing with gradients='stepped' and one forward "
                "per update"
            )
        raise MemoryError(
            f"HiFT needs {parts} in host memory, of which {available / 1e9:.1f} GB are free (or the container's limit "
            f"leaves no more). {'. '.join(ways)}"
        )
