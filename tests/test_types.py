"""The annotations of the package hold."""

from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.launching import run_python


def test_types_hold(checkout: Path) -> None:
    installed = f"transformers=={metadata.version('transformers')}"
    if installed in (checkout / "constraints-oldest.txt").read_text(encoding="utf-8").split():
        pytest.skip("types are not those of the oldest versions")
    run_python("-m", "mypy", cwd=checkout)
