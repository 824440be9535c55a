import os
import time
from pathlib import Path

import deepspeed
import pytest
import torch
from torch.utils import cpp_extension

from slivertune.parallel.zero.shm_comm import NAME, STALE_SECONDS, build_folder, check_build
from tests.helpers.launching import LaunchError, build_deepspeed_collectives


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, NAME, True)
    (tmp_path / NAME).mkdir()
    return tmp_path / NAME


@pytest.mark.parametrize("versions", [{}, {"cuda": "12.8", "hip": None}, {"cuda": None, "hip": "6.4.1"}])
@pytest.mark.parametrize("asked", [False, True])
def test_the_folder_is_torchs_own(
    asked: bool, versions: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in versions.items():
        monkeypatch.setattr(torch.version, name, version)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    if asked:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "here"))
    assert str(build_folder()) == cpp_extension._get_build_directory(NAME, verbose=False)


def test_where_deepspeed_compiles_nothing_nothing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lock").touch()
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, NAME, False)
    check_build(pytest.fail)


def test_a_build_to_come_and_one_under_way_are_said_and_a_finished_one_is_not(folder: Path) -> None:
    said: list[str] = []
    check_build(said.append)
    assert len(said) == 1 and "compiles its collectives for CPUs (shm_comm), once per machine" in said.pop()
    (folder / "lock").touch()
    check_build(said.append)
    assert len(said) == 1 and f"Waiting until it removes {folder / 'lock'}" in said.pop()
    (folder / "lock").unlink()
    (folder / f"{NAME}.so").touch()
    check_build(said.append)
    assert said == []


@pytest.mark.parametrize("is_built", [False, True])
def test_a_lock_that_a_killed_build_left_is_named_with_the_way_to_get_rid_of_it(is_built: bool, folder: Path) -> None:
    lock = folder / "lock"
    lock.touch()
    if is_built:
        (folder / f"{NAME}.so").touch()
    then = time.time() - STALE_SECONDS - 60
    os.utime(lock, (then, then))
    with pytest.raises(RuntimeError, match=rf"left 16 minutes ago by a killed build .* remove it: rm {lock}$"):
        check_build(pytest.fail)


def test_the_launcher_tests_stop_at_such_a_lock_before_they_wait(folder: Path) -> None:
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (0, 0))
    with pytest.raises(LaunchError, match=f"remove it: rm {lock}"):
        build_deepspeed_collectives()
