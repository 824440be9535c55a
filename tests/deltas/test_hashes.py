"""Hashes of tensors; a bit changed anywhere in a file of deltas or a merged checkpoint is noticed where it is read."""

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slivertune.deltas import apply, hashes, load, save_pretrained
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.deltas.hashes import has_its_hash, hash_tensor
from slivertune.deltas.merge import UNDO_FILE, merge, unmerge
from slivertune.deltas.plain_checkpoint import UNDO_FOLDER
from slivertune.deltas.sparse_file import DeltaFileError
from tests.deltas.files import Sharded, files_in, random_delta, sha256, with_hash

SHAPE = (6, 5)
DELTAS = {"fc.weight": random_delta(SHAPE, 4, 0)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {"fc.weight": torch.rand(SHAPE).bfloat16(), "other.weight": torch.rand(7)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


@pytest.fixture
def deltas(tmp_path: Path, base: Path) -> Path:
    weights = load_file(base / "model.safetensors")
    save_pretrained(tmp_path / "deltas", DELTAS, config={"density": 0.1}, base=weights)
    return tmp_path / "deltas"


def changed(content: bytes, at: int, by: int) -> bytes:
    return content[:at] + bytes([content[at] ^ by]) + content[at + 1 :]


# Of each byte: one bit that is drawn, or all.
@pytest.mark.parametrize("num_bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_a_delta_file_is_noticed(num_bits: int, deltas: Path) -> None:
    path = deltas / DELTA_FILE
    content = path.read_bytes()
    assert load(deltas).deltas.keys() == {"fc.weight"}
    source = random.Random(0)
    for at, bit in ((at, bit) for at in range(len(content)) for bit in source.sample(range(8), num_bits)):
        path.write_bytes(changed(content, at, 1 << bit))
        with pytest.raises(DeltaFileError):
            load(deltas)
    path.write_bytes(content)
    load(deltas)


def test_bytes_that_are_cut_off_swapped_or_added_are_noticed(deltas: Path) -> None:
    path = deltas / DELTA_FILE
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    swapped = (
        content[: data + 16] + content[data + 20 : data + 24] + content[data + 16 : data + 20] + content[data + 24 :]
    )
    wider = re.sub(rb"}( *)$", rb"} \1", content[8:data])
    padded = len(wider).to_bytes(8, "little") + wider + content[data:]
    for damaged in (content[:-1], content + b"\0", swapped, padded, b""):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(DeltaFileError):
            load(deltas)


def test_the_hash_is_of_all_bytes_with_zeros_in_its_own_place(deltas: Path) -> None:
    content = (deltas / DELTA_FILE).read_bytes()
    blank = re.sub(rb'(?<="file_sha256":")[0-9a-f]{64}', 64 * b"0", content)
    assert blank != content
    assert with_hash(blank) == content


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_the_hash_does_not_depend_on_how_much_is_read_at_once(
    chunk: int, deltas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", chunk)
    load(deltas)


@pytest.mark.parametrize("claimed", [None, "", 64 * "0", 64 * "F", 63 * "a", "\ud800" * 64])
def test_what_is_no_hash_of_the_file_is_none(claimed: object, deltas: Path) -> None:
    assert not has_its_hash(deltas / DELTA_FILE, claimed)


def test_damaged_deltas_are_neither_applied_nor_merged(base: Path, deltas: Path, tmp_path: Path) -> None:
    model = nn.Module()
    model.fc = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.bfloat16)
    before = model.fc.weight.detach().clone()
    path = deltas / DELTA_FILE
    content = path.read_bytes()
    source = random.Random(0)
    changes = [(source.randrange(len(content)), source.randrange(1, 256)) for _ in range(30)]
    # The very last byte belongs to a value, which no other check looks at.
    for at, by in ((len(content) - 1, 1), *changes):
        path.write_bytes(changed(content, at, by))
        with pytest.raises(DeltaFileError):
            apply(model, deltas, check_base=False)
        with pytest.raises(DeltaFileError):
            merge(base, deltas, tmp_path / "merged")
        assert torch.equal(model.fc.weight, before)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "deltas"]


def test_every_changed_byte_of_a_merged_checkpoint_is_noticed_when_it_is_unmerged(base: Path, tmp_path: Path) -> None:
    merge(base, DELTAS, tmp_path / "merged")
    unmerge(tmp_path / "merged", tmp_path / "again")
    assert files_in(tmp_path / "again") == files_in(base)
    source = random.Random(0)
    for name in ("model.safetensors", "config.json", f"{UNDO_FOLDER}/{UNDO_FILE}"):
        path = tmp_path / "merged" / name
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(changed(content, at, 1 << source.randrange(8)))
            with pytest.raises(ValueError):  # noqa: PT011
                unmerge(tmp_path / "merged", tmp_path / "other")
            assert not (tmp_path / "other").exists()
        path.write_bytes(content)
    unmerge(tmp_path / "merged", tmp_path / "other")


def test_a_file_that_is_missing_in_a_merged_checkpoint_is_named_and_one_that_was_added_is_kept(
    base: Path, tmp_path: Path
) -> None:
    merge(base, DELTAS, tmp_path / "merged")
    (tmp_path / "merged" / "README.md").write_text("mine")
    unmerge(tmp_path / "merged", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == "mine"
    (tmp_path / "merged" / "config.json").unlink()
    with pytest.raises(DeltaFileError, match=r"config\.json was removed since it was merged, so the base can't"):
        unmerge(tmp_path / "merged", tmp_path / "other")
    (tmp_path / "merged" / "config.json").write_text("{}")
    with pytest.raises(DeltaFileError, match=r"config\.json was changed since it was merged, so the base can't"):
        unmerge(tmp_path / "merged", tmp_path / "other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_a_hash_is_that_of_the_bits_whatever_the_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = (100 * torch.rand(7, 6, 5)).to(dtype)
    for chunk in (2**24, 64, 16, 4):
        monkeypatch.setattr(hashes, "CHUNK_BYTES", chunk)
        for view in (tensor, tensor.transpose(0, 2), tensor[::2], tensor[0, 0, ::2], tensor[1, 1, 1], tensor[:0]):
            assert hash_tensor(view) == sha256(view)


@pytest.mark.parametrize("chunk", [2**24, 64, 20, 4])
def test_a_hash_may_take_a_tensor_for_another_one(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", chunk)
    for tensor in (torch.rand(6, 7), torch.rand(7, 6).T):
        before = tensor.clone()
        for indices in ([], [0], [41], [3, 4, 5, 20, 40], list(range(42))):
            positions = torch.tensor(indices, dtype=torch.int32)
            values = torch.rand(len(indices))
            other = tensor.reshape(-1).clone()
            other[positions.long()] = values
            assert hash_tensor(tensor, (positions, values)) == sha256(other)
        assert torch.equal(tensor, before)


def test_a_hash_tells_zeros_of_two_signs_and_nans_apart() -> None:
    zeros = torch.zeros(3)
    assert hash_tensor(zeros) != hash_tensor(-zeros)
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert hash_tensor(quiet) != hash_tensor(other)


def test_hashing_copies_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 1024)
    sizes = [piece.numel() * 4 for piece in hashes._pieces(torch.rand(64, 96).T)]
    sizes += [piece.numel() * 4 for piece in hashes._pieces(torch.rand(64, 96))]
    assert sum(sizes) == 2 * 64 * 96 * 4
    assert max(sizes) <= 1024


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.empty(3, device="meta"), r"meta device holds no bits to hash\. Load its data first"),
        (
            torch.zeros(3).as_subclass(Sharded),
            r"sharded tensor has no hash of its own\. Gather it with full_tensor\(\)",
        ),
    ],
)
def test_what_has_no_bits_here_has_no_hash(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hash_tensor(tensor)
