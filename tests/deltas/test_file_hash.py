"""A bit changed anywhere in a file of deltas, or in a merged checkpoint, is noticed wherever it is read."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slivertune.deltas import apply, hashes, load, save_pretrained
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.deltas.hashes import has_its_hash
from slivertune.deltas.merge import UNDO_FILE, merge, unmerge
from slivertune.deltas.plain_checkpoint import UNDO_FOLDER
from slivertune.deltas.sparse_file import DeltaFileError
from tests.deltas.files import random_delta, with_hash

SHAPE = (6, 5)


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
    folder = tmp_path / "deltas"
    save_pretrained(folder, {"fc.weight": random_delta(SHAPE, 4, 0)}, config={"density": 0.1}, base=weights)
    return folder


def flips(content: bytes) -> Iterator[bytes]:
    for at in range(len(content)):
        for bit in range(8):
            yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def other_bytes(content: bytes, number: int, seed: int) -> Iterator[bytes]:
    source = random.Random(seed)
    for _ in range(number):
        at = source.randrange(len(content))
        yield content[:at] + bytes([content[at] ^ source.randrange(1, 256)]) + content[at + 1 :]


def test_every_flipped_bit_of_a_delta_file_is_noticed(deltas: Path) -> None:
    path = deltas / DELTA_FILE
    content = path.read_bytes()
    assert load(deltas).deltas.keys() == {"fc.weight"}
    for damaged in flips(content):
        path.write_bytes(damaged)
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
    # The very last byte belongs to a value, which no other check looks at.
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), *other_bytes(content, 30, seed=0)):
        path.write_bytes(damaged)
        with pytest.raises(DeltaFileError):
            apply(model, deltas, check_base=False)
        with pytest.raises(DeltaFileError):
            merge(base, deltas, tmp_path / "merged")
        assert torch.equal(model.fc.weight, before)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "deltas"]


def test_every_changed_byte_of_a_merged_checkpoint_is_noticed_when_it_is_unmerged(base: Path, tmp_path: Path) -> None:
    merge(base, {"fc.weight": random_delta(SHAPE, 4, 0)}, tmp_path / "merged")
    unmerge(tmp_path / "merged", tmp_path / "again")
    for path in [each for each in base.iterdir() if each.is_file()]:
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    source = random.Random(0)
    for name in ("model.safetensors", "config.json", f"{UNDO_FOLDER}/{UNDO_FILE}"):
        path = tmp_path / "merged" / name
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << source.randrange(8)]) + content[at + 1 :])
            with pytest.raises(ValueError):  # noqa: PT011
                unmerge(tmp_path / "merged", tmp_path / "other")
            assert not (tmp_path / "other").exists()
        path.write_bytes(content)
    unmerge(tmp_path / "merged", tmp_path / "other")


def test_a_file_that_is_missing_in_a_merged_checkpoint_is_named_and_one_that_was_added_is_kept(
    base: Path, tmp_path: Path
) -> None:
    merge(base, {"fc.weight": random_delta(SHAPE, 4, 0)}, tmp_path / "merged")
    (tmp_path / "merged" / "README.md").write_text("mine")
    unmerge(tmp_path / "merged", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == "mine"
    (tmp_path / "merged" / "config.json").unlink()
    with pytest.raises(DeltaFileError, match=r"config\.json was removed since it was merged, so the base can't"):
        unmerge(tmp_path / "merged", tmp_path / "other")
    (tmp_path / "merged" / "config.json").write_text("{}")
    with pytest.raises(DeltaFileError, match=r"config\.json was changed since it was merged, so the base can't"):
        unmerge(tmp_path / "merged", tmp_path / "other")
