from __future__ import annotations

import json
from pathlib import Path

import pytest

from slivertune.core.manifest import MANIFEST_NAME, find_damage
from slivertune.training.output import checkpoints
from slivertune.training.output.checkpoints import (
    checkpoint_folders,
    newest_whole,
    read_facts,
    remove_old,
    write_marker,
)


def make_checkpoint(output: Path, step: int, *, marked: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "deep" / "state.bin").write_bytes(b"state")
    if marked:
        write_marker(folder, {"method": "hift"})
    return folder


def test_folders_are_sorted_by_step_and_nothing_else_is_taken(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        make_checkpoint(tmp_path, step, marked=False)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert checkpoint_folders(tmp_path / "absent") == []


def test_a_marked_checkpoint_is_whole_and_knows_its_facts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    assert find_damage(folder) is None
    assert read_facts(folder) == {"method": "hift"}
    marker = json.loads((folder / MANIFEST_NAME).read_text())
    assert marker["global_step"] == 5
    assert set(marker["files"]) == {"model.bin", "deep/state.bin"}


def test_each_damage_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1, marked=False)
    assert "has no slivertune_checkpoint.json" in str(find_damage(folder))
    write_marker(folder, {})
    (folder / "model.bin").write_bytes(b"short")
    assert find_damage(folder) == "model.bin has 5 bytes where 2,560 were written"
    (folder / "model.bin").write_bytes(bytes(2560))
    assert find_damage(folder) == "model.bin holds other bytes than were written"
    assert find_damage(folder, read_files=False) is None
    (folder / "model.bin").unlink()
    assert find_damage(folder) == "model.bin is missing"
    for text in ("{", "[]", '{"format": 1}'):
        (folder / MANIFEST_NAME).write_text(text)
        assert "can't be read" in str(find_damage(folder))


def test_marking_again_follows_the_files(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    (folder / "model.bin").write_bytes(b"new")
    write_marker(folder, {})
    assert find_damage(folder) is None


def test_the_newest_whole_one_is_found_and_newer_ones_are_explained(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20)
    make_checkpoint(tmp_path, 100, marked=False)
    folder, passed_over = newest_whole(tmp_path)
    assert folder == tmp_path / "checkpoint-20"
    assert len(passed_over) == 1
    assert "checkpoint-100 is not whole" in passed_over[0]
    assert newest_whole(tmp_path / "absent") == (None, [])


def test_old_checkpoints_go_and_the_newest_whole_one_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 4, marked=False)
    assert [path.name for path in remove_old(tmp_path, 2, None)] == ["checkpoint-1", "checkpoint-2"]
    remove_old(tmp_path, 1, None)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-3"], "whole before newest"


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    remove_old(tmp_path, 1, tmp_path / "checkpoint-1")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def test_nothing_is_deleted_while_nothing_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step, marked=False)
    assert remove_old(tmp_path, 1, None) == []
    assert len(checkpoint_folders(tmp_path)) == 3


def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path, step)

    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        remove_old(tmp_path, 1, None)
    assert find_damage(tmp_path / "checkpoint-1") is not None
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-2"
