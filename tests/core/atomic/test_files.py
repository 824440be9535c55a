import json
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slivertune.core.atomic import atomic_folder, atomic_new_folder, write_json
from tests.helpers.faults import names


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [item.name for item in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077, 0o027])
@pytest.mark.parametrize("make", [atomic_folder, atomic_new_folder])
def test_what_is_written_atomically_is_as_readable_as_any_file(
    make: Callable[[Path], AbstractContextManager[Path]], umask: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        for folder in (tmp_path / "plain", tmp_path / "plain" / "sub"):
            folder.mkdir()
            (folder / "file").touch()
        write_json(tmp_path / "file.json", {})
        with make(tmp_path / "folder") as new:
            (new / "sub").mkdir()
            # Readable by its owner alone, as safetensors leaves its files.
            save_file({"a": torch.zeros(1)}, new / "file")
            (new / "sub" / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    expected = {str(path.relative_to(tmp_path / "plain")): mode(path) for path in (tmp_path / "plain").rglob("*")}
    found = {str(path.relative_to(tmp_path / "folder")): mode(path) for path in (tmp_path / "folder").rglob("*")}
    assert found == expected and len(found) == 3
    assert mode(tmp_path / "folder") == mode(tmp_path / "plain")
    assert mode(tmp_path / "file.json") == mode(tmp_path / "plain" / "file")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_hands_its_group_on_does_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    (tmp_path / "plain").mkdir()
    with atomic_folder(tmp_path / "folder") as new:
        (new / "sub").mkdir()
    assert mode(tmp_path / "folder") == mode(tmp_path / "folder" / "sub") == mode(tmp_path / "plain")


def test_a_folder_behind_a_link_is_replaced_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    with atomic_folder(tmp_path / "large" / "model") as new:
        (new / "weights").write_text("old")
    (tmp_path / "model").symlink_to(tmp_path / "large" / "model")
    with atomic_folder(tmp_path / "model") as new:
        (new / "weights").write_text("new")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "large" / "model" / "weights").read_text() == "new"
    assert [names(tmp_path / "large"), names(tmp_path)] == [["model"], ["large", "model"]]


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with atomic_folder(target) as new:
        (new / "weights").write_text("all")
        assert not target.exists()
    assert (target / "weights").read_text() == "all"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_older_folder_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as new:
        (new / "weights").write_text("old")

    def fail() -> None:
        with atomic_folder(target) as new:
            (new / "weights").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert (target / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_newer_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text, name in (("old", "a"), ("new", "b")):
        with atomic_folder(target) as new:
            (new / name).write_text(text)
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
