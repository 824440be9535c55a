"""Tensors in flat host memory, to and from which copy streams copy."""

import torch

from slivertune.core.copy_streams import CopyStreams
from slivertune.core.ledger import Kind, claim, claimed_at_birth

ALIGNMENT = 64
"""Bytes. Tensors in one buffer begin at multiples of it."""


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def tensor_at(buffer: torch.Tensor, start: int, model: torch.Tensor) -> torch.Tensor:
    """View a flat buffer, from byte `start` on, with the shape, dtype and (if it has no gaps) strides of `model`.

    Args:
        buffer: Flat uint8 buffer with enough room.
        start: First byte, a multiple of `ALIGNMENT`.
        model: Tensor that gives the shape, dtype, strides and number of bytes.
    """
    flat = buffer[start : start + model.nbytes].view(model.dtype)
    if model.dim() == 1 and model.is_contiguous():
        return flat
    # The order in memory decides which elements a vector loop combines, and so their last bits.
    dense = torch.empty_like(model, device="meta")
    return flat.as_strided(dense.shape, dense.stride())


def claimed_host_memory(streams: CopyStreams, num_bytes: int, kind: Kind) -> torch.Tensor:
    """Allocate host memory that a ledger counts as such from its first moment on.

    Args:
        streams: Copy streams that copy to and from it.
        num_bytes: Size in bytes.
        kind: Kind of the bytes in the ledger.

    Returns:
        Uninitialized uint8 tensor, shape (num_bytes,).
    """
    with claimed_at_birth(kind, "host"):
        # A forked worker of a data loader may read the model, but nothing else of ours.
        memory = streams.host_memory(num_bytes, is_inherited=kind == "parameters")
    claim(memory, kind, "host")
    return memory
