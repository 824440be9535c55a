"""One number of threads for a whole run of the tests: the recipe's, its processes', the ranks' and the scripts'."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launching import environment
from tests.helpers.ranks import run_ranks

THREADS = 3
"""Neither the default nor the number that a run is likely to have."""


def threads_of_a_rank(rank: int, num_ranks: int) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize(("given", "expected"), [((), "1"), (("THREADS=2",), "2")])
def test_make_test_passes_its_threads_to_pytest(checkout: Path, given: tuple[str, ...], expected: str) -> None:
    (line,) = [
        line
        for line in subprocess.run(
            ["make", "--dry-run", "test", *given], cwd=checkout, capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()
        if " -m pytest " in line
    ]
    assert line.startswith(f"OMP_NUM_THREADS={expected} ")


def test_ranks_have_as_many_threads_as_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    assert run_ranks(threads_of_a_rank, 2) == [(THREADS, str(THREADS))] * 2


def test_launched_scripts_have_as_many_threads_as_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(THREADS)


def test_the_head_of_a_run_says_threads_and_capability(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/core/test_ledger.py"],
        cwd=checkout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "get_num_threads() = 1, get_cpu_capability() = DEFAULT" in done.stdout
