"""Pin host memory, so that copies to and from a device overlap with its computation.

torch's own pinned allocator rounds up to a power of two, which can nearly double 80 GB of optimizer state. Here the
pages are mapped, registered with the CUDA runtime, and unregistered before they are unmapped.
"""

import mmap
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

HUGE_PAGES_FROM_BYTES = 64 * 2**20
"""Bytes from which on a buffer asks for huge pages, which are pinned several times as fast."""


class _Pages(mmap.mmap):
    """Mapped pages, unpinned before they are unmapped. A weak reference's callback would come after that."""

    pinned: tuple[torch.device, int, int] | None = None
    """If they are pinned, the device, the address and the process that did it."""

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.pinned is not None and not is_finalizing():
            _unpin(*self.pinned)


def pinned_memory(device: torch.device, num_bytes: int, *, is_inherited: bool) -> torch.Tensor:
    """Map and pin host memory. If pinning fails, warn and return it unpinned, which makes copies slower.

    Args:
        device: A CUDA device that copies to and from it.
        num_bytes: Size in bytes, at least 1. Whole pages are taken.
        is_inherited: Whether forked processes may read it and share it. Otherwise it is missing in them: a fork would
            have to copy pinned pages at once, since a device may be writing them.

    Returns:
        Uninitialized uint8 tensor, shape (num_bytes,).

    Raises:
        OSError: If no such memory can be mapped.
    """
    length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _Pages(-1, length, flags=mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if is_inherited else mmap.MAP_PRIVATE))
    if length >= HUGE_PAGES_FROM_BYTES:
        _advise(pages, mmap.MADV_HUGEPAGE)
    if not is_inherited:
        _advise(pages, mmap.MADV_DONTFORK)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    with torch.cuda.device(device):
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), length, 0))
        except RuntimeError as error:
            _forget_error(device)
            warnings.warn(
                f"Pinning {num_bytes:,} bytes of host memory failed ({error}). Training continues with memory that is "
                "not pinned: the results are the same, but copies no longer overlap with computation. Free host "
                "memory, raise the limit on locked memory (`ulimit -l`), or use state='disk', which pins two groups.",
                stacklevel=2,
            )
        else:
            pages.pinned = (device, whole.data_ptr(), os.getpid())
    return whole[:num_bytes]


def _advise(pages: mmap.mmap, advice: int) -> None:
    with suppress(OSError):  # a kernel without this advice
        pages.madvise(advice)


def _forget_error(device: torch.device) -> None:
    """Consume the failure that the runtime still remembers, so that the user's next kernel does not raise it."""
    with suppress(RuntimeError):
        torch.ones(1, dtype=torch.float32, device=device).add_(1)


def _unpin(device: torch.device, address: int, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has neither the pages nor the device
    # The optimizer may be dropped right after a step, with copies into this memory in flight.
    try:
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)
