"""The identity of a base tensor: a hash of its exact bits, without a second copy of a large one."""

import hashlib
from collections.abc import Iterator

import torch

CHUNK_BYTES = 2**24
"""Bytes of a tensor that are copied at a time."""


def hash_tensor(tensor: torch.Tensor, entries: tuple[torch.Tensor, torch.Tensor] | None = None) -> str:
    """Hash the bits of a tensor at its own dtype, in row-major order, whatever its device and strides.

    Costs one chunk of host memory, and one of the device's when the tensor is not contiguous.

    Args:
        tensor: Any shape and dtype; whole and on a device that holds data.
        entries: Flat positions (sorted integers) and values at which the tensor is to be taken for another one; it is
            not changed.

    Returns:
        The SHA-256 in hexadecimal.

    Raises:
        ValueError: If the tensor is sharded or holds no data.
    """
    if hasattr(tensor, "full_tensor"):
        raise ValueError("a sharded tensor has no hash of its own; gather it with full_tensor() first")
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device holds no bits to hash; load its data first")
    digest = hashlib.sha256()
    begin = 0
    for piece in _pieces(tensor.detach()):
        flat = piece.contiguous().view(-1).cpu()
        if entries is not None:
            flat = _with_entries(flat, begin, *entries)
        begin += len(flat)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _with_entries(flat: torch.Tensor, begin: int, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    bounds = torch.tensor([begin, begin + len(flat)], dtype=indices.dtype, device=indices.device)
    first, last = torch.searchsorted(indices, bounds).tolist()
    changed = flat.clone()
    changed[indices[first:last].long().cpu() - begin] = values[first:last].cpu()
    return changed


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, CHUNK_BYTES // tensor.element_size()))
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    for block in tensor.split(max(1, CHUNK_BYTES // row_bytes)):
        if len(block) == 1:
            yield from _pieces(block[0])
        else:
            yield block
