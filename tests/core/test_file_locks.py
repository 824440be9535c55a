"""Locks of files, and the library on systems without them."""

import ast
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slivertune.core import file_locks
from slivertune.core.atomic import atomic_folder
from slivertune.core.file_locks import try_lock, wait_for_lock
from tests.helpers.launching import run_python
from tests.planning.made import write_config

POSIX_ALONE = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"}
HOLDER = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_lock_is_had_by_one_process_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder, path.open("r+b") as file:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert try_lock(file) is False
        holder.stdin.write("\n")
        holder.stdin.flush()
        wait_for_lock(file)
        assert try_lock(file) is True


def test_where_the_file_system_has_no_locks_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*ignored: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_locks.fcntl, "flock", fail)
    with (tmp_path / "lock").open("wb") as file:
        assert try_lock(file) is None


def test_where_the_system_has_no_locks_folders_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locks, "fcntl", None)
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "target") as folder:
            (folder / "file").write_text(text)
    with (tmp_path / "target" / "file").open("rb") as file:
        wait_for_lock(file)
    assert (tmp_path / "target" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_modules_that_posix_alone_has_are_imported_where_their_absence_is_caught(checkout: Path) -> None:
    found = set()
    for path in sorted((checkout / "integrations" / "slivertune").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        caught = {
            each
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for body in node.body
            for each in ast.walk(body)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if asked := POSIX_ALONE.intersection(names):
                found |= asked
                assert node in caught, f"{path}:{node.lineno}"
    assert found == {"fcntl", "resource"}


WITHOUT_POSIX = """
import builtins, sys

there = builtins.__import__
asked = set()

def without_posix(name, globals=None, *others, **named):
    # Other libraries look at sys.platform, which says Linux here.
    importer = (globals or {}).get("__name__") or ""
    if name in sys.argv[2].split() and importer.startswith("slivertune"):
        asked.add(name)
        raise ImportError(f"no module {name}")
    return there(name, globals, *others, **named)

builtins.__import__ = without_posix
import slivertune
from slivertune.cli import main

for name in slivertune.__all__:
    getattr(slivertune, name)
main(["plan", "--model", sys.argv[1], "--seq_length", "16", "--gpu", "4090"])
print("asked for", sorted(asked))
"""


@pytest.mark.slow
def test_every_public_name_and_the_plan_need_no_module_that_posix_alone_has(tmp_path: Path) -> None:
    write_config(tmp_path)
    done = run_python("-c", WITHOUT_POSIX, tmp_path, " ".join(POSIX_ALONE), cwd=tmp_path)
    assert "tokens/s" in done.stdout
    assert "asked for ['fcntl', 'resource']" in done.stdout
