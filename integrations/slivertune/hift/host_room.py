"""Whether a host has room for what waits on it."""

from collections import Counter
from collections.abc import Sequence

from slivertune.core.host_memory import available_host_bytes
from slivertune.core.torch_internals import is_without_data
from slivertune.hift.host_gradients import bytes_of
from slivertune.hift.offload_buffer import waiting_bytes
from slivertune.hift.piece import Weight
from slivertune.hift.probe import StepMeter


def check_host_room(groups: Sequence[Sequence[Weight]], meter: StepMeter) -> None:
    """Refuse a host without room for all groups' masters and state, and for the largest group's gradients.

    Args:
        groups: What each group trains.
        meter: Knows what its steps need, and HiFT's settings.

    Raises:
        MemoryError: Before anything is allocated, with the bytes needed and those that are free.
    """
    available = available_host_bytes()
    if available is None or is_without_data():
        return
    needed: Counter[str] = Counter()
    if meter.config.state == "host":
        needed["masters and state"] = sum(sum(waiting_bytes(weights, meter).values()) for weights in groups)
    if meter.config.gradients == "host":
        needed["gradients"] = max(bytes_of(weights) for weights in groups)
    if needed.total() > available:
        parts = " and ".join(f"{num_bytes / 1e9:.1f} GB for {what}" for what, num_bytes in needed.items())
        raise MemoryError(
            f"HiFT needs {parts} in host memory, of which {available / 1e9:.1f} GB are free (or the container's limit "
            'leaves no more); use state="disk" on a fast local disk, 8-bit state (adamw8bit), master="split", or a '
            "machine with more memory"
        )
