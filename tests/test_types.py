"""The annotations of the package hold."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest


def test_types_hold(checkout: Path) -> None:
    installed = f"transformers=={metadata.version('transformers')}"
    if installed in (checkout / "constraints-oldest.txt").read_text(encoding="utf-8").split():
        pytest.skip("types are not those of the oldest versions")
    found = subprocess.run([sys.executable, "-m", "mypy"], cwd=checkout, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
