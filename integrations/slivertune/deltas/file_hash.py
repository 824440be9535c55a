"""A hash of a whole safetensors file, kept in its own metadata, so that a bit changed anywhere in it is noticed.

The hash is that of all bytes with zeros where it stands itself: the header with every name, offset and setting, and the
data. It tells damage, not who wrote the file.
"""

import hashlib
import re
from pathlib import Path

from slivertune.deltas.base_hash import CHUNK_BYTES

FIELD = "file_sha256"
"""Key of the metadata."""
UNKNOWN = 64 * "0"
"""What is written there first."""


def write_file_hash(path: Path) -> None:
    """Put the hash into a file that was written with `UNKNOWN` in its place. Costs one read of the file.

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
    """Whether a file holds the bytes that were written. Costs one read of it.

    Args:
        path: A safetensors file.
        claimed: What its metadata say.
    """
    if not isinstance(claimed, str) or not re.fullmatch("[0-9a-f]{64}", claimed):
        return False
    place = _find(path, claimed)
    return place is not None and _hash(path, place) == claimed


def _find(path: Path, digest: str) -> int | None:
    """Where the digits stand in the file; None where that is not plain."""
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
