"""A safetensors file of sparse tensors: sorted int32 positions and values for each. It is checked as if hostile.

In the file, tensor `NAME` has two entries, `NAME.indices` and `NAME.values`. The metadata have `format`, `version`, the
table `tensors` (JSON: facts by name, at least the dense `shape`), further JSON fields, and a hash of the whole file
(`write_file_hash`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slivertune.deltas.delta import INDEX_LIMIT
from slivertune.deltas.hashes import FIELD, UNKNOWN, has_its_hash, write_file_hash

_NAME_OF_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
_MAX_DIMENSIONS = 8
_DAMAGED = "The file is damaged or not to be trusted. Get it again from its source"


class DeltaFileError(ValueError):
    """A file of sparse tensors is damaged, hostile, of another version, or of another base."""


@dataclass(frozen=True)
class SparseFile:
    """Checked content of a file."""

    fields: dict[str, Any]
    """Decoded metadata other than `format`, `version`, `tensors` and the hash."""
    table: dict[str, dict[str, Any]]
    """Facts in the file by name. Only `shape` was checked."""
    entries: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Positions (int32, strictly increasing, in range) and values (finite unless allowed) of each name, on the CPU."""


def write_sparse_file(
    path: Path,
    *,
    kind: str,
    version: int,
    entries: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    table: Mapping[str, Mapping[str, Any]],
    fields: Mapping[str, Any],
) -> None:
    """Write a file of sparse tensors.

    Args:
        path: The file.
        kind: Value of `format`.
        version: Version of that format.
        entries: Positions (int32) and values of each name, any device.
        table: Facts by name.
        fields: Further metadata.

    Raises:
        ValueError: If `fields` or `table` can't be written as JSON.
    """
    metadata = {"format": kind, "version": str(version), FIELD: UNKNOWN}
    for key, value in {**fields, "tensors": table}.items():
        try:
            metadata[key] = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} can't be written as JSON ({error}). Use finite numbers, strings, lists") from error
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, (indices, values) in entries.items():
        for key, tensor in ((f"{name}.indices", indices), (f"{name}.values", values)):
            tensor = tensor.detach().cpu().contiguous()
            # safetensors refuses to write two names that share memory.
            address = tensor.untyped_storage().data_ptr()
            tensors[key] = tensor.clone() if address in storages else tensor
            storages.add(address)
    save_file(tensors, path, metadata)
    write_file_hash(path)


def read_sparse_file(
    path: Path, *, kind: str, version: int, value_key: str | None = None, finite: bool = True
) -> SparseFile:
    """Read a file of sparse tensors, and check its whole content before any use.

    Args:
        path: The file.
        kind: Required value of `format`.
        version: Required version.
        value_key: Key in the table that names the dtype of the values; None means float32.
        finite: Whether values must be finite.

    Returns:
        The content of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        DeltaFileError: If the content breaks a rule; names the tensor, the value and the rule.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there. Name the folder that save_pretrained or merge wrote")
    try:
        with safe_open(path, "pt") as file:
            fields = _metadata(path, file.metadata() or {}, kind, version)
            table = _table(path, fields.pop("tensors"))
            _check_keys(path, set(file.keys()), table)
            for name in table:
                _check_layout(path, file, name, table[name], value_key)
            entries = {name: (file.get_tensor(f"{name}.indices"), file.get_tensor(f"{name}.values")) for name in table}
    except SafetensorError as error:
        raise DeltaFileError(f"{path} is no safetensors file ({error}). {_DAMAGED}") from error
    for name, (indices, values) in entries.items():
        check_entries(f"{path}: {name!r}", indices, values, table[name]["shape"], finite=finite)
    return SparseFile(fields, table, entries)


def check_entries(
    where: str, indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], *, finite: bool = True
) -> None:
    """Check positions and values of one tensor.

    Args:
        where: Name of the tensor in errors.
        indices: int32, shape (n,).
        values: Floating point, shape (n,).
        shape: Extents of the dense tensor.
        finite: Whether values must be finite.

    Raises:
        DeltaFileError: If a position or value breaks a rule; names the first one.
    """
    num_elements = math.prod(shape)
    outside = torch.nonzero((indices < 0) | (indices >= num_elements))
    if len(outside):
        at = int(outside[0])
        raise DeltaFileError(
            f"{where}: indices[{at}]={int(indices[at])} must be in [0, {num_elements - 1}] for shape {shape}. "
            f"{_DAMAGED}"
        )
    falls = torch.nonzero(indices[1:] <= indices[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        rule = "appears twice" if indices[at] == indices[at - 1] else f"follows {int(indices[at - 1])}"
        raise DeltaFileError(
            f"{where}: indices[{at}]={int(indices[at])} {rule}, and indices must increase strictly. {_DAMAGED}"
        )
    bad = torch.nonzero(~torch.isfinite(values))
    if finite and len(bad):
        at = int(bad[0])
        raise DeltaFileError(f"{where}: values[{at}]={float(values[at])} must be finite. Use an earlier checkpoint")


def _metadata(path: Path, metadata: Mapping[str, str], kind: str, version: int) -> dict[str, Any]:
    if metadata.get("format") != kind:
        raise DeltaFileError(f"{path} has format {metadata.get('format')!r}, not {kind!r}. Name a file of {kind!r}")
    if metadata.get("version") != str(version):
        raise DeltaFileError(
            f"{path} has version {metadata.get('version')!r}, and this library reads {version}. "
            "Use the version of slivertune that wrote it"
        )
    fields = {}
    # Damage is reported first, not the field that it changed.
    if not has_its_hash(path, metadata.get(FIELD)):
        raise DeltaFileError(f"{path} holds other bytes than were written (its SHA-256 differs). {_DAMAGED}")
    for key in {*metadata, "tensors"} - {"format", "version", FIELD}:
        try:
            fields[key] = json.loads(metadata[key])
        except (KeyError, ValueError, RecursionError) as error:
            raise DeltaFileError(f"{path}: its metadata {key!r} is absent or no JSON. {_DAMAGED}") from error
    return fields


def _table(path: Path, table: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(table, dict) or not table:
        raise DeltaFileError(f"{path}: its table of tensors is {_brief(table)}, not a list of names. {_DAMAGED}")
    for name, said in table.items():
        shape = said.get("shape") if isinstance(said, dict) else None
        # Few and small, so that their product is computed quickly, even for a hostile file.
        extents: list[Any] = shape if isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS else [None]
        if not all(type(extent) is int and 0 < extent < INDEX_LIMIT for extent in extents):
            rule = f"it must be at most {_MAX_DIMENSIONS} positive integers under {INDEX_LIMIT}"
        elif math.prod(extents) >= INDEX_LIMIT:
            rule = f"beyond the {INDEX_LIMIT - 1} elements that int32 indices reach"
        else:
            continue
        raise DeltaFileError(f"{path}: {name!r} has shape {_brief(shape)}, {rule}. {_DAMAGED}")
    return {name: {**said, "shape": tuple(said["shape"])} for name, said in table.items()}


def _check_keys(path: Path, keys: set[str], table: Mapping[str, Any]) -> None:
    expected = {f"{name}.{part}" for name in table for part in ("indices", "values")}
    for what, names in (("lacks", expected - keys), ("has, beyond its table,", keys - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise DeltaFileError(f"{path} {what} the tensor {min(names)!r}{more}. {_DAMAGED}")


def _check_layout(path: Path, file: Any, name: str, said: Mapping[str, Any], value_key: str | None) -> None:
    value_dtype = "float32" if value_key is None else said.get(value_key)
    wanted = {str(dtype).removeprefix("torch."): stored for dtype, stored in _NAME_OF_DTYPE.items()}
    lengths = []
    for part, dtype in (("indices", "int32"), ("values", value_dtype)):
        entry = file.get_slice(f"{name}.{part}")
        shape = entry.get_shape()
        if not isinstance(dtype, str) or entry.get_dtype() != wanted.get(dtype):
            raise DeltaFileError(
                f"{path}: {name}.{part} has dtype {entry.get_dtype()}, it must be {_brief(dtype)}. {_DAMAGED}"
            )
        if len(shape) != 1:
            raise DeltaFileError(f"{path}: {name}.{part} has shape {shape}, it must have one dimension. {_DAMAGED}")
        lengths += shape
    if lengths[0] != lengths[1]:
        raise DeltaFileError(
            f"{path}: {name!r} has {lengths[0]} indices and {lengths[1]} values, not as many. {_DAMAGED}"
        )


def _brief(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
