"""A ROCm build of torch calls its devices CUDA and has the API of `torch.cuda`; only `torch.version` tells it apart."""

import ast
import re
from pathlib import Path

import pytest

NAMING_A_FOLDER = {"parallel/zero/shm_comm.py"}
"""Asks for the version as torch does, to find the folder in which torch compiles."""
OF_NVIDIA = re.compile(r"\b(nvidia[-_]smi|pynvml|nvml|hip|rocm)\b", re.IGNORECASE)
"""Tools that ROCm has not, and names of devices that torch has not."""


def asks_for_nvidia(source: str) -> list[int]:
    """Lines that would send a ROCm device another way than a CUDA device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_asking = node.attr in ("cuda", "hip") and ast.unparse(node.value).endswith("version")
        elif isinstance(node, ast.ImportFrom):
            is_asking = node.module == "torch.version" or bool(OF_NVIDIA.search(node.module or ""))
        elif isinstance(node, ast.Import):
            is_asking = any(OF_NVIDIA.search(alias.name) for alias in node.names)
        else:
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            is_asking = is_text and bool(OF_NVIDIA.fullmatch(node.value.partition(" ")[0].partition(":")[0]))
        if is_asking:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("if torch.version.cuda is not None: ...", True),
        ("from torch.version import cuda", True),
        ("import pynvml", True),
        ("run(['nvidia-smi', '-L'])", True),
        ("device == torch.device('hip:0')", True),
        ("if torch.cuda.is_available() and device.type == 'cuda': ...", False),
        ("note = 'for NVIDIA and AMD cards'", False),
    ],
)
def test_what_a_rocm_device_would_not_pass_is_found(source: str, is_found: bool) -> None:
    assert bool(asks_for_nvidia(source)) is is_found


def test_a_rocm_device_goes_the_way_of_cuda_everywhere(checkout: Path) -> None:
    root = checkout / "integrations" / "slivertune"
    files = [each for each in root.rglob("*.py") if each.relative_to(root).as_posix() not in NAMING_A_FOLDER]
    found = {str(each): asks_for_nvidia(each.read_text(encoding="utf-8")) for each in files}
    assert len(files) > 100 and {path: lines for path, lines in found.items() if lines} == {}
