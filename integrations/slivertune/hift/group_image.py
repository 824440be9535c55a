"""The file of one group's waiting state: a safetensors file whose data are the group's memory as it lies.

It has the form of a checkpoint's file of one group (`parallel/checkpoint/hift_sidecar.py`), which is a link to it
where all that waits can be told in that form.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slivertune.core.direct_files import in_pages, page_memory
from slivertune.core.host_tensors import tensor_at

FIRST_ROWS = "first_rows"
"""Key of the file's metadata: by tensor, the row of the weight with which it begins, as JSON; names all tensors."""
_GAP = "gap "
"""Begins the names of what lies between tensors: the form allows no bytes that belong to none."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Name = tuple[str, str]
"""Of a waiting tensor: its weight's, and its key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupImage:
    """What a file holds, but for the data."""

    header: memoryview
    """Comes before the data; whole pages."""
    num_bytes: int
    """Of the data; whole pages."""

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + self.num_bytes


def lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are what safetensors has of it; others are told as bytes without a shape."""
    return tensor.is_contiguous() and tensor.dtype in _DTYPES


def image_of(places: Mapping[Name, tuple[int, torch.Tensor]]) -> GroupImage:
    """Describe what lies in a group's memory.

    Args:
        places: By name: where in the memory a tensor begins, and the tensor, or one that is like it.
    """
    entries: dict[str, Any] = {"__metadata__": {FIRST_ROWS: json.dumps({"/".join(name): 0 for name in places})}}
    reached = 0
    for name, (start, tensor) in sorted(places.items(), key=lambda each: (each[1][0], each[1][1].nbytes)):
        reached = _add_gap(entries, reached, start)
        plain = lies_plainly(tensor)
        entries["/".join(name)] = {
            "dtype": _DTYPES[tensor.dtype] if plain else "U8",
            "shape": list(tensor.shape) if plain else [tensor.nbytes],
            "data_offsets": [start, start + tensor.nbytes],
        }
        reached = start + tensor.nbytes
    num_bytes = in_pages(max(1, reached))
    _add_gap(entries, reached, num_bytes)
    text = json.dumps(entries).encode()
    header_bytes = in_pages(8 + len(text))
    text = text.ljust(header_bytes - 8)
    return GroupImage(header=page_memory(struct.pack("<Q", len(text)) + text, header_bytes), num_bytes=num_bytes)


def mapped_tensors(path: Path, models: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
    """Tensors of a file that is read as they are, and that stay as they are when the file is replaced or removed.

    Args:
        path: The file.
        models: What each tensor is like.

    Returns:
        By name. Writing to one changes neither the file nor what others map of it.
    """
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor("/".join(name)) for name in models}
    return {
        name: found[name] if lies_plainly(model) else tensor_at(found[name], 0, model) for name, model in models.items()
    }


def _add_gap(entries: dict[str, Any], start: int, stop: int) -> int:
    if stop > start:
        entries[f"{_GAP}{start}"] = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
    return stop
