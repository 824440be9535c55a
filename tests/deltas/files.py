"""Random deltas of tiny models, and damaged files of deltas."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.delta_file import DELTA_FILE, save_pretrained

UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.2.self_attn.q_proj.weight"


def random_delta(shape: tuple[int, ...], num_weights: int, seed: int, scale: float = 0.05) -> SparseDelta:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(torch.Size(shape).numel(), generator=generator)[:num_weights].sort().values.int()
    return SparseDelta(indices, scale * torch.randn(num_weights, generator=generator), tuple(shape))


def deltas_of(
    model: nn.Module, *names: str, num_weights: int = 40, seed: int = 0, scale: float = 0.05
) -> dict[str, SparseDelta]:
    return {
        name: random_delta(tuple(named(model)[name].shape), num_weights, seed + number, scale)
        for number, name in enumerate(names or (UP, DOWN, QUERY))
    }


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def bits_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter's bytes, so that zeros of two signs and NaNs compare as what they are."""
    return {name: weight.detach().clone().view(torch.uint8) for name, weight in named(model).items()}


def same_bits(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the model has the same bits afterwards."""
    before = bits_of(model)
    yield
    assert same_bits(bits_of(model), before)


def naive_sum(weight: torch.Tensor, *deltas: SparseDelta) -> torch.Tensor:
    """The weight with dense fp32 sums of the deltas added, rounded once."""
    total, touched = torch.zeros(weight.numel()), torch.zeros(weight.numel(), dtype=torch.bool)
    for delta in deltas:
        total[delta.indices.long()] += delta.values
        touched[delta.indices.long()] = True
    sums = (weight.detach().float().flatten() + total).to(weight.dtype)
    return torch.where(touched, sums, weight.detach().flatten()).view(weight.shape)


def write_deltas(folder: Path, model: nn.Module, *names: str, seed: int = 0, **more: Any) -> Path:
    save_pretrained(folder, deltas_of(model, *names, seed=seed), config={"density": 0.1}, base=named(model), **more)
    return folder


def damage(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor], dict[str, str]], object] | None = None,
    *,
    name: str = DELTA_FILE,
    **fields: Any,
) -> Path:
    """Rewrite a file with changed tensors or metadata, as somebody would who makes its hash agree."""
    path = folder / name
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    if change is not None:
        change(tensors, metadata)
    metadata |= fields
    save_file(tensors, path, metadata)
    path.write_bytes(with_hash(path.read_bytes()))
    return folder


def with_hash(content: bytes) -> bytes:
    """Independent: the digits are replaced by zeros, the whole is hashed, and the hash takes their place."""
    blank = re.sub(rb'("file_sha256":")[0-9a-f]{64}', rb"\g<1>" + 64 * b"0", content)
    digest = hashlib.sha256(blank).hexdigest().encode()
    return re.sub(rb'("file_sha256":")[0-9a-f]{64}', rb"\g<1>" + digest, blank)


def change_table(metadata: dict[str, str], name: str, **said: Any) -> None:
    table = json.loads(metadata["tensors"])
    table[name] |= said
    metadata["tensors"] = json.dumps(table)


def sha256(tensor: torch.Tensor) -> str:
    """Independent: all bits at once, in row-major order."""
    return hashlib.sha256(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Sharded(torch.Tensor):
    """As torch's DTensor tells that it is one."""

    def full_tensor(self) -> None: ...
