"""The tests of a real GPU, `tests/gpu`, on the pretended one: none may fail there that could pass on a card."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.pretended_cuda.on_device import require_device

CHECKOUT = Path(__file__).resolve().parents[2]
NEEDS_TIME = {"test_the_first_pieces_arrive_while_backward_still_runs"}


def outcomes(chosen: str, folder: Path) -> dict[str, list[str]]:
    """Names of the tests of a mark expression by outcome: passed, failed, skipped."""
    require_device()
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretended_cuda.torch_cuda", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "-m", chosen, f"--junitxml={report}", "tests/gpu"],
        cwd=CHECKOUT,
        # bitsandbytes compiles its CPU kernels otherwise.
        env={**os.environ, "PRETENDED_CUDA_DEVICES": "2", "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), found.stdout[-4000:] + found.stderr[-4000:]
    by_outcome: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        by_outcome[outcome].append(case.attrib["name"])
    assert found.returncode == bool(by_outcome["failed"]), found.stdout[-4000:]
    return by_outcome


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "num_at_least"), [("not slow", 20), ("slow", 90)])
def test_they_pass_but_for_one_that_needs_time(chosen: str, num_at_least: int, tmp_path: Path) -> None:
    found = outcomes(chosen, tmp_path)
    assert found["failed"] == [] and {*found["skipped"]} <= NEEDS_TIME
    assert len(found["passed"]) >= num_at_least
