from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from slivertune.aside import folder_aside, write_json


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [item.name for item in tmp_path.iterdir()] == ["results.json"]


def test_what_is_written_aside_is_as_readable_as_any_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").touch()
    write_json(tmp_path / "file.json", {})
    with folder_aside(tmp_path / "folder"):
        pass
    for ours, theirs in ((tmp_path / "file.json", plain / "file"), (tmp_path / "folder", plain)):
        assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(theirs.stat().st_mode)


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with folder_aside(target) as new:
        (new / "weights").write_text("all")
        assert not target.exists()
    assert (target / "weights").read_text() == "all"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_older_folder_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    with folder_aside(target) as new:
        (new / "weights").write_text("old")

    def fail() -> None:
        with folder_aside(target) as new:
            (new / "weights").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert (target / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_newer_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text, name in (("old", "a"), ("new", "b")):
        with folder_aside(target) as new:
            (new / name).write_text(text)
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
