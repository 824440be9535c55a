"""Runs `make` in another folder with the environment of the tests, in which it installs nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAX_SECONDS = 900
_VARIABLES = frozenset({"ARGS", "PYTHON", "THREADS", "TORCH_PIP_ARGS", "VENV", "WORKERS"})


def without_outer_make() -> dict[str, str]:
    """The environment without the variables of a `make` that runs the tests, which another one would take up."""
    own = os.environ.items()
    return {name: value for name, value in own if name not in _VARIABLES and not name.startswith("MAKE")}


def skip_without_make() -> None:
    """Skip a test if there is no make, or no environment that make made: it would install into this one."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    if not (Path(sys.prefix) / ".installed-dev").exists():
        pytest.skip(f"{sys.prefix} was not made by `make test`")


def make(root: Path, *words: str) -> str:
    """Run make and see that it ends well.

    Args:
        root: Folder of a Makefile, whose package is imported.
        *words: Target and variables.

    Returns:
        What it printed.
    """
    for name in ("pyproject.toml", "constraints.txt"):
        # The environment is renewed only for files newer than it.
        os.utime(root / name, (0, 0))
    kept = {name: value for name, value in without_outer_make().items() if not name.startswith(("PYTEST_", "HF_"))}
    done = subprocess.run(
        ["make", *words, f"VENV={sys.prefix}"],
        cwd=root,
        env={**kept, "PYTHONPATH": str(root / "integrations"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
