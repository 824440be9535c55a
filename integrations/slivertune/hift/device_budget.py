"""Share out the bytes of the device that HiFT may hold: state first, resident blocks get the rest."""

from collections.abc import Callable
from typing import Literal

from slivertune.hift.config import HiFTConfig
from slivertune.parked.streamed_model import room_for_blocks

Share = int | Literal["auto"]
"""Bytes, or "auto" for those that are measured to be free."""


def share_out(config: HiFTConfig, state_bytes: Callable[[], int]) -> tuple[Share, Share]:
    """Return the bytes of prefetched chunks, and those of resident blocks.

    Each cycle must load all state and write it back, and a block is only read: so state has the first share.

    Args:
        config: Settings. A part that they set is not changed.
        state_bytes: Function that returns the bytes of the largest group's masters and state.
    """
    total, prefetched, resident = config.device_bytes, config.prefetch_bytes, config.resident_bytes
    if total == "auto":
        return prefetched, resident
    if prefetched == "auto":
        rest = total - (0 if resident == "auto" else resident)
        prefetched = min(rest, state_bytes()) if config.weights == "host" else rest
    assert isinstance(prefetched, int)
    if resident == "auto" and config.weights == "host":
        resident = room_for_blocks(total, prefetched)
    return prefetched, resident
