"""Deltas in a folder: one safetensors file with positions, values, the configuration and a hash of each base tensor.

Nothing in it is ever unpickled. For each tensor, the file holds sorted int32 positions and float32 values. Its metadata
have `config`, `base_model_name`, a table of base tensors (shape, dtype, SHA-256, other names of a tied tensor), and a
hash of the whole file, so that no changed bit goes unnoticed.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slivertune.core.atomic import atomic_file, atomic_new_folder, check_absent
from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.hashes import hash_tensor
from slivertune.deltas.sparse_file import DeltaFileError, check_entries, read_sparse_file, write_sparse_file

DELTA_FILE = "sft_delta.safetensors"
"""Name of the file in the folder."""
VERSION = 2
"""Version of the file format."""
_KIND = "slivertune.sft_delta"
PLAIN_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights that deltas can be added to."""


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """Identity of the tensor that a delta was trained on."""

    dtype: str
    """Name of its dtype in torch, or that of the codes if it was quantised."""
    sha256: str
    """Hash of its bits (`hash_tensor`)."""
    tied_names: tuple[str, ...] = ()
    """Other names of the same tensor in the trained model."""

    @property
    def is_quantized(self) -> bool:
        """Whether the delta was trained over codes, such as bitsandbytes' 4-bit ones."""
        return self.dtype not in PLAIN_DTYPES


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """Checked content of a folder of deltas."""

    deltas: dict[str, SparseDelta]
    """Delta of each tensor, by its name in the trained model. It is on the CPU."""
    config: dict[str, Any]
    """Settings of the training, as given to `save_pretrained`."""
    base: dict[str, BaseTensor]
    """Identity of each base tensor."""
    base_model_name: str | None
    """Folder or hub id of the base, if it was given."""
    source: str
    """Origin of the deltas, for errors."""


def save_pretrained(
    folder: str | Path,
    deltas: Mapping[str, SparseDelta],
    *,
    config: Mapping[str, Any],
    base: Mapping[str, torch.Tensor],
    base_values: Mapping[str, torch.Tensor] | None = None,
    base_hashes: Mapping[str, str] | None = None,
    base_model_name: str | None = None,
) -> None:
    """Write deltas. A new folder appears complete or not at all, and so does the file in an existing folder.

    Args:
        folder: Folder to write to. An older file of deltas in it is replaced; nothing else in it is touched.
        deltas: Delta of each tensor, by name.
        config: Settings of the training, in types that JSON supports.
        base: Tensors that the deltas were trained on, by name. Names beyond those of `deltas` are allowed, and are
            needed to detect tied weights: `dict(model.named_parameters(remove_duplicate=False))`.
        base_values: Pretrained values at a delta's positions, for tensors in `base` that already hold the sums.
        base_hashes: Results of `hash_tensor` for pretrained tensors that `base` has on the meta device.
        base_model_name: Folder or hub id of the base model.

    Raises:
        ValueError: If there is nothing to save, or a delta has no base tensor, does not fit it, or is not finite.
        OSError: If writing fails; names the folder and the space needed. Older content stays complete.
    """
    folder = Path(folder)
    base_values = base_values or {}
    if not deltas:
        raise ValueError("there are no deltas to save. Name the weights to train in the configuration")
    for name, delta in deltas.items():
        _check_fits(name, delta, base)
        check_entries(f"delta of {name!r}", delta.indices, delta.values, delta.shape)
        values = base_values.get(name)
        if values is not None and (values.shape != delta.values.shape or values.dtype != base[name].dtype):
            raise ValueError(
                f"base_values of {name!r} are {tuple(values.shape)} in {name_of(values.dtype)}, the delta has "
                f"{tuple(delta.values.shape)} and the base {name_of(base[name].dtype)}. Give the pretrained values "
                "there"
            )

    def write(path: Path) -> None:
        write_sparse_file(
            path,
            kind=_KIND,
            version=VERSION,
            entries={name: (delta.indices, delta.values) for name, delta in deltas.items()},
            table=_describe(deltas, base, base_values, base_hashes or {}),
            fields={"config": dict(config), "base_model_name": base_model_name},
        )

    needs_bytes = sum(delta.indices.nbytes + delta.values.nbytes for delta in deltas.values())
    if folder.is_symlink() or folder.exists():
        if not folder.is_dir():
            check_absent(folder)
        with atomic_file(folder / DELTA_FILE, needs_bytes=needs_bytes) as path:
            write(path)
        return
    with atomic_new_folder(folder, needs_bytes=needs_bytes) as temporary:
        write(temporary / DELTA_FILE)


def load(folder: str | Path, *, base: Mapping[str, torch.Tensor] | None = None) -> DeltaFile:
    """Read deltas, and check the whole content of the file before it is used.

    Args:
        folder: Folder of `save_pretrained`.
        base: Tensors to use the deltas on, by the names in the file; if given, their hashes must be those of the file.

    Returns:
        The deltas and their metadata.

    Raises:
        FileNotFoundError: If the folder holds no file of deltas.
        DeltaFileError: If the file is damaged, hostile, of another version, or of another base; names the tensor, the
            value and the rule.

    Example:
        >>> for name, delta in load("deltas").deltas.items():
        ...     print(name, delta.indices.numel())
    """
    path = Path(folder) / DELTA_FILE
    file = read_sparse_file(path, kind=_KIND, version=VERSION)
    config, model_name = file.fields.get("config"), file.fields.get("base_model_name")
    if not isinstance(config, dict) or not (model_name is None or isinstance(model_name, str)):
        raise DeltaFileError(
            f"{path}: config must be a JSON object and base_model_name a string or null: the file is damaged. Get it "
            "again from its source"
        )
    found = DeltaFile(
        deltas={
            name: SparseDelta(indices, values, file.table[name]["shape"])
            for name, (indices, values) in file.entries.items()
        },
        config=config,
        base={name: _base_tensor(path, name, said) for name, said in file.table.items()},
        base_model_name=model_name,
        source=str(folder),
    )
    if base is not None:
        for name, delta in found.deltas.items():
            _check_fits(name, delta, base)
            check_base(found.source, name, found.base[name], dtype=base[name].dtype, sha256=hash_tensor(base[name]))
    return found


def check_base(source: str, name: str, expected: BaseTensor, *, dtype: torch.dtype, sha256: str | None) -> None:
    """Refuse a tensor other than the one that a delta was trained on.

    Args:
        source: Origin of the delta.
        name: Name of the tensor there.
        expected: Identity of the tensor that the delta was trained on.
        dtype: Dtype of this tensor.
        sha256: Hash of this tensor; None compares only dtypes.

    Raises:
        DeltaFileError: If dtype or bits differ.
    """
    here = name_of(dtype)
    if here != expected.dtype:
        raise DeltaFileError(
            f"{source}: {name!r} was trained on a {expected.dtype} tensor, and this one is {here}. Load or save the "
            f"base in {expected.dtype} first (from_pretrained(..., dtype={expected.dtype!r}))"
        )
    if sha256 is not None and sha256 != expected.sha256:
        raise DeltaFileError(
            f"{source}: {name!r} was trained on another base (SHA-256 {expected.sha256[:16]}... of its tensor there, "
            f"{sha256[:16]}... here). Use the base of the deltas, and remove deltas applied or merged before"
        )


def name_of(dtype: torch.dtype) -> str:
    """Return the dtype's name, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _describe(
    deltas: Mapping[str, SparseDelta],
    base: Mapping[str, torch.Tensor],
    base_values: Mapping[str, torch.Tensor],
    base_hashes: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    names_of_memory: dict[Any, list[str]] = {}
    for name, tensor in base.items():
        names_of_memory.setdefault(memory_of(tensor), []).append(name)
    table = {}
    for name, delta in deltas.items():
        entries = (delta.indices, base_values[name]) if name in base_values else None
        tied = tuple(other for other in names_of_memory[memory_of(base[name])] if other != name)
        sha256 = base_hashes.get(name) or hash_tensor(base[name], entries)
        table[name] = {"shape": list(delta.shape), **asdict(BaseTensor(name_of(base[name].dtype), sha256, tied))}
    return table


def _base_tensor(path: Path, name: str, said: Mapping[str, Any]) -> BaseTensor:
    dtype, sha256, tied = said.get("dtype"), said.get("sha256"), said.get("tied_names")
    if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
        problem = f"base dtype {str(dtype)[:30]!r}, it must be one of torch's"
    elif not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        problem = f"base hash {str(sha256)[:70]!r}, it must be 64 hexadecimal digits"
    elif not isinstance(tied, list) or not all(isinstance(other, str) for other in tied):
        problem = f"tied_names {str(tied)[:60]!r}, it must be a list of names"
    else:
        return BaseTensor(dtype, sha256, tuple(tied))
    raise DeltaFileError(f"{path}: {name!r} has {problem}. Get the file again from its source")


def _check_fits(name: str, delta: SparseDelta, base: Mapping[str, torch.Tensor]) -> None:
    if name not in base:
        raise DeltaFileError(f"{name!r} has a delta but no base tensor. Give all the base's tensors by name")
    shape, dtype = tuple(base[name].shape), name_of(base[name].dtype)
    if dtype in PLAIN_DTYPES and shape != delta.shape:
        raise DeltaFileError(
            f"{name!r} has a delta for shape {delta.shape}, the base tensor has {shape}. Use the base of the deltas"
        )


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that all names of one tensor share: tied weights are one parameter, or two in the same memory."""
    return tensor.device, tensor.data_ptr() or id(tensor), tuple(tensor.shape)
