"""Exact weights that are read from the checkpoint they came from, so that no copy of them stays in memory.

A weight counts as the checkpoint's if all its bits are the file's: a model may have changed since it was loaded. The
files stay open and mapped, so that a folder may be removed or replaced in the meantime.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from typing_extensions import override

from slivertune.core.copy_streams import Event
from slivertune.parked.exact_source import ExactSource, HostCopy, StreamsOf
from slivertune.parked.safetensors_files import file_by_tensor

_PEFT_PART = "base_layer"
_PEFT_PREFIX = "base_model.model."


class _OpenFile:
    """A mapped safetensors file.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = safe_open(path, "pt")
        self._state = path.stat()

    def read(self, key: str) -> torch.Tensor:
        """Return a tensor of the file, mapped.

        Raises:
            RuntimeError: If the file was written in place since it was opened.
        """
        if self._was_written():
            raise RuntimeError(
                f"{self._path} has changed since its weights were parked, and held the only exact copy of {key}. Save "
                "to another folder than that of the base model"
            )
        tensor: torch.Tensor = self._tensors.get_tensor(key)  # type: ignore[no-untyped-call]
        return tensor

    def _was_written(self) -> bool:
        """Return whether the open file has changed. One that was removed or replaced stays as it was."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        before = self._state
        is_ours = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
        return is_ours and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


class CheckpointTensor(ExactSource):
    """A weight that is never trained, in a checkpoint's file. If others write to it, a copy in host memory is made.

    Args:
        file: The file.
        key: Name of the tensor in the file.
        dtype: Dtype of the weight.
        device: Device on which it computes.
        streams_of: Function that returns the copy streams of a device.
    """

    def __init__(
        self, file: _OpenFile, key: str, dtype: torch.dtype, device: torch.device, streams_of: StreamsOf
    ) -> None:
        self._file, self._key, self._dtype = file, key, dtype
        self._device, self._streams_of = device, streams_of
        self._copy: HostCopy | None = None

    @override
    def read(self) -> torch.Tensor:
        return self._file.read(self._key).to(self._dtype) if self._copy is None else self._copy.read()

    @override
    def write(self, weight: torch.Tensor) -> None:
        if self._copy is None:
            self._copy = HostCopy(weight.detach(), self._device, self._streams_of)
        else:
            self._copy.write(weight)

    @override
    def load(self, into: torch.Tensor) -> Event:
        if self._copy is not None:
            return self._copy.load(into)
        into.copy_(self.read())  # from memory that is not pinned: the host waits
        return None

    @override
    def end_loading(self) -> None:
        """Do nothing: no memory of the device was taken beside the weight."""

    @override
    def store(self, weight: torch.Tensor) -> Event:
        self.write(weight)
        return None


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Files of the checkpoint from which a model came."""

    files: Mapping[str, _OpenFile]
    """Open files by tensor."""

    @classmethod
    def of(cls, model: nn.Module) -> "CheckpointFiles":
        """Find and open the files of a model's checkpoint: a local folder, or a snapshot in the hub's cache."""
        folder = _folder_of(model)
        if folder is None:
            return cls({})
        try:
            file_names = file_by_tensor(folder)
        except FileNotFoundError:
            return cls({})
        files = {name: _OpenFile(folder / name) for name in set(file_names.values())}
        return cls({tensor: files[name] for tensor, name in file_names.items()})

    def source_of(
        self, name: str, weight: torch.Tensor, device: torch.device, streams_of: StreamsOf
    ) -> CheckpointTensor | None:
        """Return the storage of a weight in the files, if they have it with the same bits.

        Args:
            name: Name of the weight in the model.
            weight: The exact weight, on any device.
            device: Device on which it computes.
            streams_of: Function that returns the copy streams of a device.
        """
        for key in _names_in_files(name):
            if key not in self.files:
                continue
            source = CheckpointTensor(self.files[key], key, weight.dtype, device, streams_of)
            stored = source.read()
            if stored.shape == weight.shape and torch.equal(_bits(stored), _bits(weight.detach().to("cpu"))):
                return source
        return None


def _folder_of(model: nn.Module) -> Path | None:
    """Return the folder from which a model, or a model in it, was loaded. None if it is not on this machine."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        name = getattr(config, "_name_or_path", None)
        if isinstance(name, str) and name:
            return Path(name) if Path(name).is_dir() else _cached_folder(name, getattr(config, "_commit_hash", None))
    return None


def _cached_folder(name: str, commit: str | None) -> Path | None:
    """Return the folder of a snapshot in the hub's cache. None if no safetensors of it are there."""
    for file in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        try:
            cached = try_to_load_from_cache(name, file, revision=commit)
        except HFValidationError:
            return None  # the path of a folder that is not there any more
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def _names_in_files(name: str) -> Iterator[str]:
    """Yield the names that a file may have for a weight: without PEFT's part, and without that of the base model."""
    plain = ".".join(part for part in name.removeprefix(_PEFT_PREFIX).split(".") if part != _PEFT_PART)
    yield plain
    yield plain.partition(".")[2]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
