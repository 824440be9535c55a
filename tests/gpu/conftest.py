"""Tests in this folder need a CUDA device and skip without one."""

from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest hands every collected test to every conftest.
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
