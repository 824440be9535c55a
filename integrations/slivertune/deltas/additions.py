"""Matching of deltas with tensors of a model or checkpoint, and their sums per tensor. Nothing is written here."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from slivertune.deltas.delta import Overlap, SparseDelta, rounded_sum, sum_deltas
from slivertune.deltas.delta_file import PLAIN_DTYPES, DeltaFile, check_base, load, name_of
from slivertune.deltas.names import NameIndex
from slivertune.deltas.sparse_file import DeltaFileError

Source = Mapping[str, SparseDelta] | DeltaFile | str | Path
"""Deltas in memory, deltas read from a folder, or the folder."""


@dataclass(frozen=True, slots=True)
class Destination(ABC):
    """A tensor that deltas can be added to."""

    name: str
    """Name of the tensor in its model or checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Extents of the tensor."""

    @abstractmethod
    def sha256(self) -> str:
        """Hash the tensor's bits."""


D = TypeVar("D", bound=Destination)


@dataclass(frozen=True, slots=True)
class Addition(Generic[D]):
    """Sum of the deltas of one tensor."""

    target: D
    delta: SparseDelta
    """Sum of the deltas, on the CPU."""
    overlap: Overlap
    sha256: str | None
    """Hash of the tensor's present bits. None if the check of the base did not need it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """Model or checkpoint that holds the tensors, and its words in errors."""

    name: str
    """Name of the model or checkpoint."""
    unknown: str
    """Way out if a name is not found."""
    quantized: str
    """Way out if the tensor is quantised."""
    allow_quantized_base: bool
    """Whether deltas that were trained over codes may be added to plain weights."""
    has_copies: bool
    """Whether tied weights may be stored twice here."""


def read_sources(sources: Source | Sequence[Source]) -> list[DeltaFile]:
    """Read and name deltas.

    Deltas in memory have no base; only their shape is known.

    Args:
        sources: One or several folders, files that were read, or deltas by name.

    Returns:
        One entry per source.

    Raises:
        FileNotFoundError: If a folder holds no deltas.
        ValueError: If there is no source, or one is invalid.
        TypeError: If a source is of another type.
    """
    listed = [sources] if isinstance(sources, (str, Path, DeltaFile, Mapping)) else list(sources)
    if not listed:
        raise ValueError("there are no deltas to add. Name at least one folder")
    return [_read(source, number) for number, source in enumerate(listed)]


def add_up(
    files: Sequence[DeltaFile], targets: Mapping[str, D], info: TargetInfo, *, hash_base: bool
) -> list[Addition[D]]:
    """Find the deltas' tensors, check that they are the base, and sum the deltas of each.

    Args:
        files: The deltas.
        targets: Tensors by name; tied weights are one object under several names.
        info: Description of the model or checkpoint.
        hash_base: Whether to compare the bits of the tensors with those that the deltas were trained on.

    Returns:
        One addition per tensor, in the order of the files.

    Raises:
        DeltaFileError: If a tensor is absent, quantised, of another shape or dtype, or not the base.
    """
    names = NameIndex(targets)
    found = [(file, *pair) for file in files for pair in _pairs(file, targets, names, info)]
    # Checks that read the tensors come last.
    checked = {id(target): target for file, name, target in found if hash_base and _is_plain(file, name)}
    hashes = {key: target.sha256() for key, target in checked.items()}
    deltas_of: dict[int, tuple[D, list[SparseDelta]]] = {}
    for file, name, target in found:
        if _is_plain(file, name):
            check_base(file.source, name, file.base[name], dtype=target.dtype, sha256=hashes.get(id(target)))
        deltas_of.setdefault(id(target), (target, []))[1].append(file.deltas[name])
    return [Addition(target, *sum_deltas(deltas), hashes.get(key)) for key, (target, deltas) in deltas_of.items()]


def add_rounded(name: str, pretrained: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add a delta to pretrained values in fp32 and round once.

    Args:
        name: Name of the tensor, for the error.
        pretrained: Shape (n,), the weight's dtype.
        values: float32, shape (n,), same device.

    Returns:
        The sums, shape (n,), the weight's dtype.

    Raises:
        ValueError: If a sum of finite numbers is beyond the dtype's range.
    """
    sums = rounded_sum(pretrained, values)
    overflown = torch.nonzero(torch.isfinite(pretrained) & ~torch.isfinite(sums))
    if len(overflown):
        at = int(overflown[0])
        raise ValueError(
            f"{name!r}: {float(pretrained[at])} + {float(values[at])} is beyond the range of "
            f"{name_of(pretrained.dtype)}. Use the base in bfloat16 or float32, or add fewer deltas at once"
        )
    return sums


def _read(source: Source, number: int) -> DeltaFile:
    if isinstance(source, (str, Path)):
        return load(source)
    if isinstance(source, DeltaFile):
        return source
    if isinstance(source, Mapping):
        return DeltaFile(deltas=dict(source), config={}, base={}, base_model_name=None, source=f"deltas {number}")
    raise TypeError(
        f"deltas are folders or mappings of names to SparseDelta, not {type(source).__name__}. Name the folder that "
        "save_pretrained wrote"
    )


def _is_plain(file: DeltaFile, name: str) -> bool:
    return name in file.base and not file.base[name].is_quantized


def _pairs(file: DeltaFile, targets: Mapping[str, D], index: NameIndex, info: TargetInfo) -> Iterator[tuple[str, D]]:
    names: dict[int, str] = {}
    for name, delta in file.deltas.items():
        for target in _targets_of(file, name, targets, index, info):
            other = names.setdefault(id(target), name)
            if other != name:
                raise DeltaFileError(
                    f"{file.source}: {other!r} and {name!r} are one tensor in {info.name}. Keep one of them"
                )
            _check_target(file, name, delta, target, info)
            yield name, target


def _targets_of(file: DeltaFile, name: str, targets: Mapping[str, D], index: NameIndex, info: TargetInfo) -> list[D]:
    aliases = (name, *(file.base[name].tied_names if name in file.base else ()))
    found = [targets[match] for alias in aliases if (match := index.find(alias)) is not None]
    if not found:
        raise DeltaFileError(
            f"{file.source}: {name!r} names no tensor of {info.name}, or several. Use the model that the deltas were "
            f"trained on{f' ({file.base_model_name})' if file.base_model_name else ''}{info.unknown}"
        )
    distinct = list({id(target): target for target in found}.values())
    if len(distinct) > 1 and not info.has_copies:
        raise DeltaFileError(
            f"{file.source}: {' and '.join(map(repr, aliases))} were one tied tensor in training and are "
            f"{len(distinct)} in {info.name}. Tie them (model.tie_weights())"
        )
    return distinct


def _check_target(file: DeltaFile, name: str, delta: SparseDelta, target: Destination, info: TargetInfo) -> None:
    where, here = f"{file.source}: {name!r}", name_of(target.dtype)
    if here not in PLAIN_DTYPES:
        raise DeltaFileError(f"{where}: {info.name} holds {here} there. {info.quantized}")
    if target.shape != delta.shape:
        raise DeltaFileError(
            f"{where} has shape {delta.shape}, {info.name} has {target.shape} there. Use the base of the deltas"
        )
    if name in file.base and file.base[name].is_quantized and not info.allow_quantized_base:
        raise DeltaFileError(
            f"{where} was trained over {file.base[name].dtype} codes, and these {here} weights may not be their "
            "source. If they are, set allow_quantized_base (results are close, not identical)"
        )
