"""Runs that end by SIGKILL at a random moment resume with the bits of an undisturbed run; one kill a layout.

`benchmarks/faults.py` has all methods, and its result is kept.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.conftest import CHECKOUT

LAYOUTS = ("single", "ddp", "fsdp2", "zero2", "zero3")
METHODS = ("hift", "sft", "tokentune_hift")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one kill of all ranks, and one of a single rank, came to under each layout."""
    output = tmp_path_factory.mktemp("faults") / "faults.json"
    done = subprocess.run(
        [
            *[sys.executable, str(CHECKOUT / "benchmarks" / "faults.py"), "--methods", "hift", "--kills", "1"],
            "--seed",
            "1",
            "--output",
            str(output),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert output.exists(), done.stderr
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_resumes_with_the_bits_of_an_undisturbed_one(layout: str, cells: dict[str, Any]) -> None:
    check(cells[f"{layout}/hift"]["kills"], layout, num_kills=1)


def check(kills: list[dict[str, Any]], layout: str, num_kills: int) -> None:
    everyone = [kill for kill in kills if kill["everyone"]]
    alone = [kill for kill in kills if not kill["everyone"]]
    assert (len(everyone), len(alone)) == (num_kills, layout != "single")
    for kill in kills:
        assert kill["same_bits"] and kill["passed"], kill
        if kill["half_saved"] not in (None, "whole"):
            for refusal in kill["half_saved"].split(" | "):
                assert refusal.startswith("DamagedCheckpointError: FOLDER/checkpoint-"), kill
        # From the newest checkpoint that was whole; this very update's only if its rename was done already.
        newest = (kill["update"] - 1) // 3 * 3
        is_saving = kill["phase"] in ("save", "rename")
        assert kill["resumed_from"] in ({newest, kill["update"]} if is_saving else {newest}), kill
    for kill in everyone:
        assert set(kill["statuses"]) == {-9}
    for kill in alone:
        assert kill["statuses"][kill["rank"]] == -9 and kill["others_ended"], kill


def test_the_kills_that_are_kept_cover_every_cell_and_phase_and_all_passed() -> None:
    result = json.loads((CHECKOUT / "benchmarks" / "results" / "faults.json").read_text(encoding="utf-8"))
    assert result["cells"].keys() == {f"{layout}/{method}" for layout in LAYOUTS for method in METHODS}
    for name, cell in result["cells"].items():
        check(cell["kills"], name.split("/")[0], num_kills=2)
    assert Counter(kill["phase"] for cell in result["cells"].values() for kill in cell["kills"]).keys() == {
        "forward",
        "backward",
        "step",
        "save",
        "rename",
    }
