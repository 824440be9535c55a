"""Hashes that identify a base tensor, and that reveal any changed bit in a file.

A tensor's hash covers its exact bits, without a second copy of a large tensor. A file's hash is stored in its own
safetensors metadata. It covers all bytes (the header with every name, offset and setting, and the data), with zeros in
place of the hash itself. It shows damage, not who wrote the file.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

CHUNK_BYTES = 2**24
"""Bytes of a tensor or file that are copied at once."""
FIELD = "file_sha256"
"""Key of the file's hash in the metadata."""
UNKNOWN = 64 * "0"
"""Value of the hash until `write_file_hash` replaces it."""


def hash_tensor(tensor: torch.Tensor, entries: tuple[torch.Tensor, torch.Tensor] | None = None) -> str:
    """Hash the bits of a tensor at its own dtype, in row-major order, whatever its device and strides.

    Costs one chunk of host memory, and one on the device if the tensor is not contiguous.

    Args:
        tensor: Any shape and dtype; whole and on a device that holds data.
        entries: Flat positions (sorted integers) and values that replace the tensor's own in the hash; the tensor is
            not changed.

    Returns:
        The SHA-256 in hexadecimal.

    Raises:
        ValueError: If the tensor is sharded or holds no data.
    """
    if hasattr(tensor, "full_tensor"):
        raise ValueError("a sharded tensor has no hash of its own. Gather it with full_tensor() first")
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device holds no bits to hash. Load its data first")
    digest = hashlib.sha256()
    begin = 0
    for piece in _pieces(tensor.detach()):
        flat = piece.contiguous().view(-1).cpu()
        if entries is not None:
            indices, values = entries
            bounds = torch.tensor([begin, begin + len(flat)], dtype=indices.dtype, device=indices.device)
            part = slice(*torch.searchsorted(indices, bounds).tolist())
            flat = flat.index_put((indices[part].long().cpu() - begin,), values[part].cpu())
        begin += len(flat)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, CHUNK_BYTES // tensor.element_size()))
        return
    for block in tensor.split(max(1, CHUNK_BYTES // tensor[0].nbytes)):
        if len(block) == 1:
            yield from _pieces(block[0])
        else:
            yield block


def write_file_hash(path: Path) -> None:
    """Write the hash into a file that was written with `UNKNOWN` in its place. Costs one read of the file.

    Args:
        path: The file.
    """
    place = _find(path, UNKNOWN)
    assert place is not None
    digest = _hash(path, place)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digest.encode("ascii"))


def has_its_hash(path: Path, claimed: object) -> bool:
    """Return whether a file still holds the bytes that were written. Costs one read of the file.

    Args:
        path: A safetensors file.
        claimed: Hash in its metadata.
    """
    if not isinstance(claimed, str) or not re.fullmatch("[0-9a-f]{64}", claimed):
        return False
    place = _find(path, claimed)
    return place is not None and _hash(path, place) == claimed


def _find(path: Path, digest: str) -> int | None:
    """Find the offset of the hash's digits in the file. Return None if it is ambiguous."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    before = f'"{FIELD}":"'.encode("ascii")
    if header.count(before) != 1 or header.count(before + digest.encode("ascii") + b'"') != 1:
        return None
    return 8 + header.index(before) + len(before)


def _hash(path: Path, place: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(place))
        digest.update(UNKNOWN.encode("ascii"))
        file.seek(len(UNKNOWN), 1)
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
