"""The annotations of the package, the tests and the benchmarks hold."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest


def test_types_hold(checkout: Path) -> None:
    if f"transformers=={metadata.version('transformers')}" not in (checkout / "constraints.txt").read_text().split():
        pytest.skip("types are those of the versions in constraints.txt")
    found = subprocess.run([sys.executable, "-m", "mypy"], cwd=checkout, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
