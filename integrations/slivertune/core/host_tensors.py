"""Tensors in flat memory of the host, which copy streams copy to and from."""

import torch

from slivertune.core.copy_streams import CopyStreams
from slivertune.core.ledger import Kind, claim, claimed_at_birth

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
    if model.dim() == 1 and model.is_contiguous():
        return flat
    # The order in memory decides which elements vector loops take together, and so their last bits.
    dense = torch.empty_like(model, device="meta")
    return flat.as_strided(dense.shape, dense.stride())


def claimed_host_memory(streams: CopyStreams, num_bytes: int, kind: Kind) -> torch.Tensor:
    """Memory of the host that counts as such from its first moment on.

    Args:
        streams: Copy to and from it.
        num_bytes: How many.
        kind: What they are.

    Returns:
        uint8, shape (num_bytes,), of arbitrary content.
    """
    with claimed_at_birth(kind, "host"):
        # A forked worker of a data loader may read the model, nothing else of ours.
        memory = streams.host_memory(num_bytes, is_inherited=kind == "parameters")
    claim(memory, kind, "host")
    return memory
