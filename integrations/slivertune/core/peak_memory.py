"""The memory of a CUDA device that was free even at the peak."""

from collections import Counter

import torch

from slivertune.core.device_memory import usable_bytes

MARGIN_SHARE = 16
"""Inverse of the share of usable memory that stays free: batches of one size do not always take the same bytes."""


class PeakMemory:
    """Largest memory that torch has reserved on CUDA devices.

    It is noted in every update, because a script may free torch's unused memory and reset its statistics at any time.
    """

    def __init__(self) -> None:
        self._reserved: Counter[torch.device] = Counter()

    def note(self, device: torch.device) -> None:
        """Keep the peak so far, if it is larger than all before. Does nothing without CUDA."""
        if device.type == "cuda":
            self._reserved[device] = max(self._reserved[device], torch.cuda.max_memory_reserved(device))

    def unused_bytes(self, device: torch.device) -> int:
        """Return the bytes of a device that were free even at the peak, less a margin, or 0 without CUDA."""
        if device.type != "cuda":
            return 0
        self.note(device)
        usable = usable_bytes(device)
        return max(0, usable - self._reserved[device] - usable // MARGIN_SHARE)
