import fcntl
import itertools
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slivertune.core import atomic
from slivertune.core.atomic import (
    atomic_file,
    atomic_folder,
    atomic_new_folder,
    exchange,
    partial_version,
    recover,
    write_json,
)
from tests.core.killed import replace
from tests.helpers.faults import (
    Fault,
    Operations,
    counted,
    denied,
    error_of,
    full_disk,
    hidden,
    interrupted,
    names,
    snapshot,
)
from tests.helpers.pairwise import pairwise

VERSIONS = {"old": {"a": "old", "sub/b": "old"}, "new": {"b": "new", "sub/c": "new", "sub/deep/d": "new"}}


def write_folder(target: Path, version: str) -> None:
    replace(target, VERSIONS[version])


def version_at(target: Path) -> str | None:
    """The version that lies there whole; fails on anything else."""
    if not target.exists():
        return None
    files = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    return next(version for version, expected in VERSIONS.items() if files == expected)


@pytest.mark.slow
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_process_killed_at_any_file_operation_leaves_the_old_folder_or_the_new_one(
    can_exchange: bool, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.killed", str(tmp_path), str(can_exchange)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    number = int(done.stdout)
    assert number > 15
    seen = []
    for each in range(1, number):
        target = tmp_path / str(each) / "model"
        if can_exchange:
            assert target.exists()
        recover(target)
        seen.append(version_at(target))
        # The next writer leaves nothing of the killed one.
        write_folder(target, "new")
        assert version_at(target) == "new"
        assert names(target.parent) == ["model"]
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}


@pairwise(fault=[full_disk, denied, interrupted], once=[True, False], can_exchange=[True, False])
def test_an_error_at_any_file_operation_leaves_the_old_folder_or_the_new_one(
    fault: Fault, once: bool, can_exchange: bool, tmp_path: Path
) -> None:
    outcomes = []
    for number in itertools.count(1):
        target = tmp_path / str(number) / "model"
        write_folder(target, "old")
        operations = Operations(number, fault, once=once)
        with counted(operations, can_exchange=can_exchange):
            error = error_of(partial(write_folder, target, "new"))
        assert not isinstance(error, OSError) or str(target) in str(error)
        recover(target)
        outcomes.append(version_at(target))
        write_folder(target, "new")
        assert version_at(target) == "new"
        assert names(target.parent) == ["model"]
        if len(operations.names) < number:
            break
    assert len(outcomes) > 15
    assert {"old", "new"} == set(outcomes)
    assert outcomes[-1] == "new"


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as first:
        (first / "a").write_text("old")
        write_folder(target, "new")
        assert (first / "a").read_text() == "old"
        (first / "sub").mkdir()
        (first / "sub" / "b").write_text("old")
    # The last one to end is the one that stays.
    assert version_at(target) == "old"
    assert names(tmp_path) == ["model"]


def test_what_dead_processes_of_other_targets_left_is_left_alone(tmp_path: Path) -> None:
    for name in ("model", "model.x", "mode", ".model"):
        folder = tmp_path / f".{name}.abcdefgh.partial"
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "half").touch()
    (tmp_path / ".model.notours").mkdir()
    write_folder(tmp_path / "model", "new")
    assert names(tmp_path) == [
        "..model.abcdefgh.partial",
        ".mode.abcdefgh.partial",
        ".model.notours",
        ".model.x.abcdefgh.partial",
        "model",
    ]


@pytest.mark.parametrize("files", [(), ("lock",), ("half",), ("lock", "half"), ("lock", "model/weights")])
def test_every_kind_of_remains_is_removed_by_the_next_write(files: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / ".model.abcdefgh.partial"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with atomic_file(tmp_path / "model") as path:
        path.write_text("x")
    assert names(tmp_path) == ["model"]


def test_a_link_with_the_name_of_remains_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").touch()
    (tmp_path / ".model.abcdefgh.partial").symlink_to(tmp_path / "mine")
    write_folder(tmp_path / "model", "new")
    assert (tmp_path / "mine" / "lock").exists()


def test_a_reader_puts_nothing_back_while_the_writer_lives(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_folder(target, "old")
    with partial_version(target) as version:
        target.rename(version.folder / "retired")
        recover(target)
        assert not target.exists()
    # The writer has ended without a new version.
    assert version_at(target) == "old"


def test_a_folder_whose_old_version_cannot_be_put_back_is_kept_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    write_folder(target, "old")

    def fail() -> None:
        with partial_version(target) as version:
            target.rename(version.folder / "retired")
            monkeypatch.setattr(atomic, "_put_back", lambda retired, target: None)

    fail()
    assert not target.exists()
    monkeypatch.undo()
    recover(target)
    assert version_at(target) == "old"
    write_folder(target, "new")
    assert names(tmp_path) == ["model"]


def test_two_folders_change_places(tmp_path: Path) -> None:
    for version in VERSIONS:
        write_folder(tmp_path / version, version)
    if not exchange(tmp_path / "old", tmp_path / "new"):
        pytest.skip("this file system can't")
    assert [version_at(tmp_path / each) for each in ("old", "new")] == ["new", "old"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "old", tmp_path / "absent")


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    (tmp_path / ".model.abcdefgh.partial").mkdir()
    (tmp_path / ".model.abcdefgh.partial" / "lock").touch()
    write_folder(tmp_path / "model", "old")
    write_folder(tmp_path / "model", "new")
    assert version_at(tmp_path / "model") == "new"
    # Nobody can tell whether its process lives.
    assert hidden(tmp_path) == [".model.abcdefgh.partial"]


def test_a_new_folder_is_whole_or_absent_at_any_error(tmp_path: Path) -> None:
    def write(target: Path) -> None:
        with atomic_new_folder(target) as folder:
            (folder / "a").write_text("all")

    for number in itertools.count(1):
        target = tmp_path / str(number)
        operations = Operations(number, full_disk)
        with counted(operations):
            error = error_of(partial(write, target))
        assert error is None or str(target) in str(error)
        assert snapshot(tmp_path).keys() <= {*map(str, range(number + 1)), *(f"{each}/a" for each in range(number + 1))}
        assert not target.exists() or (target / "a").read_text() == "all"
        if len(operations.names) < number:
            break
    assert number > 5
    assert target.exists()


# ---- what appears


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
