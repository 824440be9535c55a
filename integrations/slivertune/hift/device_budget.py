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
        state_bytes: Function that returns the bytes of all chunks of the largest group on the device (`chunks_bytes`).
    """
    total, prefetched, resident = config.device_bytes, config.prefetch_bytes, config.resident_bytes
    if total == "auto":
        return prefetched, resident
    if prefetched == "auto":
        rest = total - (0 if resident == "auto" else resident)
        prefetched = min(rest, state_bytes())
    # Two chunks pass even if none is prefetched.
    passing = min(total, 2 * config.chunk_bytes)
    assert isinstance(prefetched, int)
    if resident == "auto" and config.weights == "host":
        resident = room_for_blocks(total, max(prefetched, passing))
    return prefetched, resident


def chunks_bytes(config: HiFTConfig, state_bytes: int, gradient_bytes: int) -> int:
    """Return the bytes of all chunks of a group on the device.

    Args:
        config: Settings.
        state_bytes: Bytes of the group's masters and state.
        gradient_bytes: Bytes of its gradients, parts of which are in the chunks if they are offloaded.
    """
    # All chunks have the size of the largest.
    return state_bytes + config.chunk_bytes + (gradient_bytes if config.gradients != "device" else 0)
