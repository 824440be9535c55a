"""Locks of files."""

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slivertune.core import file_locks
from slivertune.core.file_locks import try_lock, wait_for_lock

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
