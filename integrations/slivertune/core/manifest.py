"""Manifest of a checkpoint's folder: names, sizes and hashes of its files, written after all of them.

Programs write a checkpoint file by file into its final folder, and overwrite an older one in the same way. The name of
a folder therefore does not tell whether the folder is whole. A folder is whole if its manifest exists and agrees with
every file that it lists. Other files in it are ignored. A subfolder with its own manifest is listed by that manifest.

The manifest guards against interrupted writes and broken disks. It does not guard against an attacker, who could write
a manifest as well.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from slivertune.core.atomic import is_partial, sync, write_json

MANIFEST_NAME = "slivertune_checkpoint.json"
FORMAT = 2
"""Version of the manifest's format."""

_PART_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_MAX_THREADS = 8
_HASH = "blake2b"
_OWN_HASH = "blake2b of all else"


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not whole. Nothing of it was loaded."""


class OtherFormatError(DamagedCheckpointError):
    """A checkpoint with a manifest of another version of this library."""


def write_manifest(
    folder: str | Path,
    entries: Mapping[str, Any] | None = None,
    *,
    files: Iterable[Path] | None = None,
) -> None:
    """Mark a folder as whole. Costs one read of its files, which are on the disk before the manifest is written.

    Args:
        folder: The folder. Nothing may be writing to it any more.
        entries: Further entries of the manifest, as plain JSON.
        files: Paths of the files that belong to it. By default, all files in the folder.

    Raises:
        OSError: If a file can't be read, or the manifest can't be written. The folder then has no manifest.

    Example:
        >>> write_manifest("checkpoint-500")
    """
    folder = Path(folder)
    remove_manifest(folder)
    # A subfolder's own manifest lists its files.
    paths = sorted(_files(folder) if files is None else set(files).intersection(_files(folder)))
    for path in paths:
        sync(path)
    for parent in {parent for path in paths for parent in path.parents if folder == parent or folder in parent.parents}:
        sync(parent)
    stamps: dict[str, dict[str, Any]] = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, _HASH: digest}
        for path, digest in zip(paths, digests(paths), strict=True)
    }
    said = {"format": FORMAT, **(entries or {}), "files": stamps}
    write_json(folder / MANIFEST_NAME, {**said, _OWN_HASH: _digest_entries(said)})


def remove_manifest(folder: str | Path) -> None:
    """Mark a folder as not whole until the next `write_manifest`, before it is written over."""
    path = Path(folder) / MANIFEST_NAME
    if path.exists():
        path.unlink()
        sync(path.parent)


def read_entries(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a folder, its files included.

    Raises:
        DamagedCheckpointError: If the manifest is missing or can't be read.
        OtherFormatError: If another version wrote it.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise DamagedCheckpointError(f"it has no {MANIFEST_NAME}, so its writing was cut short")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        stamps = entries["files"]
        if entries["format"] != FORMAT:
            raise OtherFormatError(
                f"its {MANIFEST_NAME} has format {entries['format']!r}, and this version reads {FORMAT}. Continue with "
                "the version of slivertune that wrote it"
            )
        if entries.pop(_OWN_HASH) != _digest_entries(entries):
            raise DamagedCheckpointError(f"its {MANIFEST_NAME} holds other entries than were written")
        for name, stamp in stamps.items():
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts or type(stamp["bytes"]) is not int:
                raise DamagedCheckpointError(f"its {MANIFEST_NAME} can't be read")
            stamp.get(_HASH, "").encode("ascii")
    except DamagedCheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(f"its {MANIFEST_NAME} can't be read") from error
    return dict(entries)


def is_of_other_format(folder: str | Path) -> bool:
    """Return whether another version of this library wrote the manifest of a folder.

    Args:
        folder: The folder, which need not have a manifest.
    """
    try:
        read_entries(folder)
    except OtherFormatError:
        return True
    except DamagedCheckpointError:
        return False
    return False


def find_damage(folder: str | Path, *, read_files: bool = True, depth: int = 8) -> str | None:
    """Find the reason why a folder is not whole.

    Args:
        folder: Folder with a manifest.
        read_files: Whether to compare contents too, and not only sizes.
        depth: Number of nested folders with manifests that are allowed. A link could form an endless cycle.

    Returns:
        The reason, or None if the folder is whole.
    """
    folder = Path(folder)
    try:
        stamps = read_entries(folder)["files"]
        for name, stamp in stamps.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            num_bytes = path.stat().st_size
            if num_bytes != stamp["bytes"]:
                return f"{name} has {num_bytes:,} bytes where {stamp['bytes']:,} were written"
        if read_files:
            hashes = {name: stamp[_HASH] for name, stamp in stamps.items() if _HASH in stamp}
            found = digests([folder / name for name in hashes])
            for (name, expected), digest in zip(hashes.items(), found, strict=True):
                if digest != expected:
                    return f"{name} holds other bytes than were written"
    except (DamagedCheckpointError, OSError) as error:
        return str(error)
    for name in stamps:
        if PurePosixPath(name).name == MANIFEST_NAME:
            if depth == 0:
                return "manifests are nested too deeply"
            damage = find_damage((folder / name).parent, read_files=read_files, depth=depth - 1)
            if damage is not None:
                return f"in {PurePosixPath(name).parent}, {damage}"
    return None


def check_whole(folder: str | Path) -> None:
    """Refuse a folder that is not whole. Costs one read of its files.

    Args:
        folder: A checkpoint, or a part of one that has its own manifest.

    Raises:
        DamagedCheckpointError: If it is not whole. The message names the file, and the newest whole folder beside it.
    """
    damage = find_damage(folder)
    if damage is None:
        return
    folder = Path(folder)
    if not folder.is_dir():
        raise DamagedCheckpointError(f"{folder} is not there, or not a folder. Name a checkpoint")
    text = f"{folder} can't be loaded, and nothing of it was: {damage}. Use an older checkpoint{_whole_sibling(folder)}"
    if not (folder / MANIFEST_NAME).is_file() and any(folder.iterdir()):
        call = shlex.quote(f"from slivertune.core.manifest import write_manifest; write_manifest({str(folder)!r})")
        text += f". If it is whole, since another program or an older version wrote it, run python -c {call}"
    raise DamagedCheckpointError(text)


def _whole_sibling(folder: Path) -> str:
    try:
        siblings = [path for path in folder.absolute().parent.iterdir() if path != folder.absolute()]
        candidates = sorted(
            (each for each in siblings if (each / MANIFEST_NAME).is_file()), key=_written_at, reverse=True
        )
    except OSError:
        return ""
    # Only sizes are compared here. A load compares the contents, too.
    whole = next((each for each in candidates if find_damage(each, read_files=False) is None), None)
    return "" if whole is None else f", such as {whole}"


def _written_at(folder: Path) -> int:
    return (folder / MANIFEST_NAME).stat().st_mtime_ns


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder but its manifest. A subfolder with a manifest yields that manifest alone."""
    for path in sorted(folder.iterdir()):
        if is_partial(path):
            # A killed process left it. The next write removes it.
            continue
        if path.is_dir():
            inner = path / MANIFEST_NAME
            yield from [inner] if inner.is_file() else _files(path)
        elif path.is_file() and path.name != MANIFEST_NAME:
            yield path


def _digest_entries(entries: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(entries, sort_keys=True).encode(), digest_size=32).hexdigest()


def digests(paths: Iterable[Path]) -> list[str]:
    """Hash each file over the hashes of its parts, so that threads share a large file.

    Args:
        paths: Paths of files.

    Returns:
        Hash of each file, in hexadecimal.
    """
    paths = list(paths)
    parts = [
        (path, start) for path in paths for start in range(0, max(1, path.stat().st_size), _PART_BYTES)
    ]  # an empty file is one empty part
    summaries = {path: hashlib.blake2b(digest_size=32) for path in paths}
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for (path, _), digest in zip(parts, pool.map(_digest_part, parts), strict=True):
            summaries[path].update(digest)
    return [summaries[path].hexdigest() for path in paths]


def _digest_part(part: tuple[Path, int]) -> bytes:
    path, start = part
    summary = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        file.seek(start)
        left = _PART_BYTES
        while left and (block := file.read(min(_READ_BYTES, left))):
            summary.update(block)
            left -= len(block)
    return summary.digest()
