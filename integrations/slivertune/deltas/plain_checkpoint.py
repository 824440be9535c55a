"""A plain Hugging Face checkpoint as files: the position of each tensor's bytes, without a model. Only safetensors."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open

from slivertune.deltas.additions import Destination

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
UNDO_FOLDER = "sft_undo"
"""Name of the folder in a merged checkpoint that unmerging needs. Readers ignore it."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Read at once. Small, because a comparison of two tensors holds two chunks of each while the next are read.
_PIECE_BYTES = 2**21
# Other forms of the weights, which a merge would leave at the base's values, and a training's own state.
_WEIGHT_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt", ".gguf", ".onnx", ".onnx_data"),
    *(".ot", ".tflite", ".mlmodel", ".npz", ".pdparams"),
)
_WEIGHT_INDICES = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class StoredTensor(Destination):
    """A tensor in a safetensors file."""

    shard: Path
    """Path of the file."""
    start: int
    """Offset of the first byte in the file."""
    num_bytes: int

    def sha256(self) -> str:
        """Hash the tensor's bits. The result is that of `hash_tensor` for the loaded tensor."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def load(self) -> torch.Tensor:
        """Read the whole tensor."""
        with safe_open(self.shard, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor

    def pieces(self) -> Iterator[bytearray]:
        """Read the tensor's bytes in chunks of whole elements."""
        with self.shard.open("rb") as file:
            file.seek(self.start)
            left = self.num_bytes
            while left and (piece := bytearray(file.read(min(left, _PIECE_BYTES)))):
                yield piece
                left -= len(piece)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Copy the entries at flat positions. The file must be writable, as a copy's is.

        Args:
            indices: int32, shape (n,).

        Returns:
            The entries, shape (n,), in the tensor's dtype.
        """
        return self._rows()[indices.long()].view(-1).view(self.dtype)

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Write the entries at flat positions in the file. All other bytes stay unchanged.

        Args:
            indices: int32, shape (n,).
            values: The entries, shape (n,), in the tensor's dtype.
        """
        self._rows()[indices.long()] = values.contiguous().view(torch.uint8).view(-1, self.dtype.itemsize)

    def _rows(self) -> torch.Tensor:
        # As bytes, since a tensor's address may be no multiple of its element size.
        mapped = numpy.memmap(self.shard, dtype=numpy.uint8, mode="r+", offset=self.start, shape=(self.num_bytes,))
        return torch.from_numpy(mapped).view(-1, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class PlainCheckpoint:
    """A folder that `from_pretrained` reads."""

    folder: Path
    tensors: dict[str, StoredTensor]
    files: list[Path]
    """Paths of the checkpoint's files, relative to the folder: shards, their index, configuration, tokenizer."""
    left_out: list[Path]
    """Files that may be other forms of the same weights, relative to the folder, which a change makes stale."""

    def tied_copies(self, name: str) -> list[str]:
        """Find other tensors that are copies of an embedding, unless the configuration rules tied embeddings out.

        Args:
            name: Name of the tensor.
        """
        config = _json(self.folder / "config.json") if (self.folder / "config.json").is_file() else {}
        parts = [config, *(each for each in config.values() if isinstance(each, dict))]
        tensor, vocabularies = self.tensors[name], {each.get("vocab_size") for each in parts}
        if len(tensor.shape) != 2 or tensor.shape[0] not in vocabularies:
            return []
        if any(each.get("tie_word_embeddings") is False for each in parts):
            return []
        alike = (each for each in self.tensors.values() if (each.shape, each.dtype) == (tensor.shape, tensor.dtype))
        return [each.name for each in alike if each.name != name and each.sha256() == tensor.sha256()]

    def moved(self, tensor: StoredTensor, folder: Path) -> StoredTensor:
        """Return the tensor in a copy of the checkpoint."""
        return replace(tensor, shard=folder / tensor.shard.relative_to(self.folder))


def open_checkpoint(folder: Path) -> PlainCheckpoint:
    """Read the positions of a checkpoint's tensors.

    Args:
        folder: Folder of the checkpoint.

    Returns:
        The checkpoint's tensors and files.

    Raises:
        FileNotFoundError: If the folder or its safetensors files are missing.
        ValueError: If the checkpoint is quantised or damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder. Name that of a checkpoint, for one on the hub after `hf download ID --local-dir "
            "FOLDER`"
        )
    _check_not_quantized(folder)
    shard_of = _shards(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        found = _tensors(folder / shard)
        for name in sorted(tensors.keys() & found.keys()):
            raise ValueError(
                f"{folder} holds {name!r} in two shards, {tensors[name].shard.name} and {shard}, and it is not certain "
                "which one is read. Load the model and save it with save_pretrained"
            )
        tensors |= found
    lost = sorted(set(shard_of) - set(tensors) - {""})
    if lost:
        raise ValueError(f"{folder / INDEX_FILE} names {lost[0]!r}, which its shard lacks. Get the checkpoint again")
    files, left_out = _other_files(folder, set(shard_of.values()))
    return PlainCheckpoint(folder, tensors, files, left_out)


def _shards(folder: Path) -> dict[str, str]:
    if (folder / SINGLE_FILE).is_file():
        return {"": SINGLE_FILE}
    index = folder / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}, and other forms are not read. Load the model and "
            "save it with save_pretrained"
        )
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} has no weight_map. Get the checkpoint again")
    for shard in set(map(str, names.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise ValueError(
                f"{index} names the shard {shard!r}, which is not a file in {folder}. Get the checkpoint again"
            )
    return {name: str(shard) for name, shard in names.items()}


def _tensors(shard: Path) -> dict[str, StoredTensor]:
    try:
        # Compares the header with the file's size.
        with safe_open(shard, "numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{shard} is no whole safetensors file ({error}). Get the checkpoint again") from error
    with shard.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        # A dtype that torch lacks is never touched, and only has to count as no float.
        dtype = _DTYPES.get(entry["dtype"], torch.uint8)
        tensors[name] = StoredTensor(name, dtype, tuple(entry["shape"]), shard, 8 + size + begin, end - begin)
    return tensors


def _check_not_quantized(folder: Path) -> None:
    config = folder / "config.json"
    settings = _json(config).get("quantization_config") if config.is_file() else None
    if settings is not None:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
        bits = " in 4 bits" if isinstance(settings, dict) and settings.get("load_in_4bit") else ""
        raise ValueError(
            f"{folder} is quantised ({method}{bits}): merging would quantise again and change weights that no delta "
            "touches. Merge into the 16-bit checkpoint that it was made from (with --allow_quantized_base if the "
            "deltas were trained over the quantised one), or keep the deltas beside it"
        )


def _other_files(folder: Path, shards: set[str]) -> tuple[list[Path], list[Path]]:
    files: list[Path] = []
    left_out: list[Path] = []
    own = shards if shards == {SINGLE_FILE} else shards | {INDEX_FILE}
    modules = _module_folders(folder)
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        # Leaves out a training's checkpoints beside its result, and version control.
        if path.is_file() and not any(p.startswith((".", "checkpoint-")) or p == UNDO_FOLDER for p in relative.parts):
            is_weight = path.name.endswith(_WEIGHT_ENDINGS + _WEIGHT_INDICES)
            is_own = str(relative) in own or relative.parts[0] in modules
            (left_out if is_weight and not is_own else files).append(relative)
    return files, left_out


def _module_folders(folder: Path) -> set[str]:
    """Return the folders of the other modules of a sentence-transformers model, such as a dense layer's."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return {part for each in modules for part in Path(each["path"]).parts[:1]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}). Get the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object. Get the checkpoint again")
    return value
