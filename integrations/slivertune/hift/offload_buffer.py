"""Memory in which a group's masters and optimizer state wait for their turn: pinned host memory, or files."""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from slivertune.core.ledger import MemoryTier, claim, claimed_at_birth

ALIGNMENT = 64
"""Bytes; tensors in one buffer begin at multiples of it."""


def aligned(num_bytes: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def tensor_at(buffer: torch.Tensor, start: int, model: torch.Tensor) -> torch.Tensor:
    """The part of a flat buffer that begins at a byte, in a model's shape, dtype and, if it has no gaps, strides.

    Args:
        buffer: uint8, one dimension, with room enough.
        start: A multiple of `ALIGNMENT`.
        model: What the tensor is like; the bytes of both are as many.
    """
    flat = buffer[start : start + model.nbytes].view(model.dtype)
    # The order in memory decides which elements vector loops take together, and so their last bits.
    dense = torch.empty_like(model, device="meta")
    return flat.as_strided(dense.shape, dense.stride())


def small_copy(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of a few bytes, in ordinary host memory; waits for the device."""
    with claimed_at_birth("state", "host"):
        copy = value.detach().to("cpu", copy=True)
    claim(copy, "state", "host")
    return copy


class OffloadBuffer:
    """Owns one group's waiting tensors.

    Args:
        tier: Where its bytes count in the ledger.
        allocate: Makes a uint8 buffer of so many bytes, or raises.
    """

    def __init__(self, tier: MemoryTier, allocate: Callable[[int], torch.Tensor]) -> None:
        self._tier = tier
        self._allocate = allocate
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._used_bytes: dict[torch.dtype, int] = {}

    def reserve(self, num_bytes: Mapping[torch.dtype, int]) -> None:
        """Allocate ahead for the tensors to come, so that a lack of memory shows now.

        One buffer a dtype: torch.save refuses tensors of several dtypes in one storage.
        """
        with claimed_at_birth("state", self._tier):
            buffers = {dtype: self._allocate(size) for dtype, size in num_bytes.items() if size}
        for dtype, buffer in buffers.items():
            claim(buffer, "state", self._tier)
            self._buffers[dtype], self._used_bytes[dtype] = buffer, 0

    def empty_like(self, model: torch.Tensor) -> torch.Tensor:
        """A tensor with arbitrary content, from the reserved buffer while it lasts, else from a new one."""
        dtype = model.dtype
        if dtype not in self._buffers or self._used_bytes[dtype] + model.nbytes > self._buffers[dtype].numel():
            self.reserve({dtype: aligned(max(1, model.numel()) * dtype.itemsize)})
        start = self._used_bytes[dtype]
        self._used_bytes[dtype] += aligned(model.nbytes)
        return tensor_at(self._buffers[dtype], start, model)


def host_buffer(device: torch.device) -> OffloadBuffer:
    """A buffer in host memory, pinned when `device` is a CUDA device so that copies run beside the computation."""
    return OffloadBuffer("host", partial(_pinned, device) if device.type == "cuda" else _pageable)


def disk_buffer(directory: Path) -> OffloadBuffer:
    """A buffer in memory-mapped files under `directory`.

    Files are allocated whole (a full disk is an error, never a SIGBUS) and unlinked as soon as they are mapped, so
    that nothing stays behind, however the process ends.
    """
    return OffloadBuffer("disk", lambda num_bytes: _mapped(directory, num_bytes))


def _pageable(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _pinned(device: torch.device, num_bytes: int) -> torch.Tensor:
    if num_bytes == 0:
        return _pageable(0)
    # torch's own pinned allocator rounds up to a power of two, which can nearly double 80 GB of state. Whole pages, so
    # that no two registrations share one.
    room = _pageable(num_bytes + 2 * mmap.PAGESIZE)
    start = -room.data_ptr() % mmap.PAGESIZE
    buffer = room[start : start + num_bytes]
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        pages_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), pages_bytes, 0))
        except RuntimeError as error:
            raise RuntimeError(
                f"{num_bytes:,} bytes of host memory for a group's state can't be pinned ({error}); free host memory, "
                'or use state="disk", which pins nothing'
            ) from error
    weakref.finalize(room.untyped_storage(), _unpin, device, buffer.data_ptr()).atexit = False
    return buffer


def _unpin(device: torch.device, address: int) -> None:
    # The optimizer may be dropped right after a step, with copies on their way into this memory.
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def _mapped(directory: Path, num_bytes: int) -> torch.Tensor:
    directory.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="hift-", suffix=".state", dir=directory)
    try:
        os.posix_fallocate(handle, 0, max(1, num_bytes))
        return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            error.errno,
            f"state_dir={str(directory)!r} has no room for {num_bytes:,} bytes of a group's state "
            f"({os.strerror(error.errno or 0)}); free space there, name another state_dir, or use state='host'",
        ) from error
    finally:
        os.close(handle)
        Path(name).unlink()
