"""The largest value that fits, against trying every one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slivertune.core.byte_text import format_bytes
from slivertune.planning.largest import find_largest
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request, run_plan
from tests.planning.made import GIB, moment, simple_plan, write_config

MIB = 2**20


def estimator(
    peak: Callable[[int], int], field: str = "batch_size"
) -> tuple[Callable[[PlanRequest], MemoryRequirement], list[int]]:
    """Plans of a peak that follows from the field alone, and the values that were planned."""
    asked: list[int] = []

    def estimate(request: PlanRequest) -> MemoryRequirement:
        asked.append(getattr(request, field))
        return add_allowance(simple_plan(request, moment(parameters=GIB, residual=peak(asked[-1]) * MIB)))

    return estimate, asked


PEAKS: dict[str, Callable[[int], int]] = {
    "straight": lambda value: 10 * value,
    "flat, then steep": lambda value: max(300, 40 * value - 200),
    "three pieces": lambda value: max(100 + value, 7 * value, 90 * value - 5000),
    "steps": lambda value: 64 * (value // 7),
}


@pytest.mark.parametrize("limit", [2 * GIB, 3 * GIB + 12345, 11 * GIB])
@pytest.mark.parametrize("peak", PEAKS.values(), ids=PEAKS.keys())
def test_it_is_the_one_that_trying_all_would_find(peak: Callable[[int], int], limit: int) -> None:
    estimate, _ = estimator(peak)
    limits = Limits(device_bytes=limit)
    value = 1
    while estimate(paper_request(batch_size=value + 1)).fits(limits):
        value += 1
    estimate, asked = estimator(peak)
    found = find_largest(paper_request(batch_size=3), "batch_size", limits, estimate)
    assert (found.value, found.next_value) == (value, value + 1)
    assert found.requirement.fits(limits) and found.next_device_bytes is not None
    assert found.next_device_bytes > limit
    assert len(asked) == len(set(asked)) <= 22


def test_a_straight_peak_takes_a_handful_of_plans() -> None:
    estimate, asked = estimator(PEAKS["straight"])
    found = find_largest(paper_request(), "batch_size", Limits(device_bytes=24 * GIB), estimate)
    assert found.value > 2000 and len(asked) <= 16


def test_lengths_go_by_128_up_to_what_the_model_takes() -> None:
    estimate, _ = estimator(lambda length: length // 8, "seq_length")
    found = find_largest(paper_request(), "seq_length", Limits(device_bytes=2 * GIB), estimate, most=100_000)
    assert found.value % 128 == 0 and found.next_value == found.value + 128
    assert "would need" in found.describe()
    short = find_largest(paper_request(), "seq_length", Limits(device_bytes=2 * GIB), estimate, most=1100)
    assert (short.value, short.next_value) == (1024, None) and "the most that the model takes" in short.describe()


def test_what_does_not_fit_at_all_is_an_error_with_a_way_out() -> None:
    estimate, _ = estimator(PEAKS["straight"])
    with pytest.raises(ValueError, match=r"batch_size 1 needs .*Leave out --max batch_size, and let --fit"):
        find_largest(paper_request(), "batch_size", Limits(device_bytes=GIB), estimate)


@pytest.mark.usefixtures("plans_made_once")
def test_the_command_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path / "model", num_hidden_layers=1)
    words = ["--model", str(folder), "--max", "batch_size", "--seq_length", "256", "--fit"]
    run_plan(["--model", str(folder), "--seq_length", "256", "--batch_size", "8", "--json"])
    limit = json.loads(capsys.readouterr().out)["need_bytes"]
    run_plan([*words, str(limit), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["max"]["value"] == values["request"]["batch_size"] == 8
    assert values["max"]["next_need_bytes"] > limit == values["fit"]["limit_bytes"]
    run_plan([*words, str(limit)])
    text = capsys.readouterr().out
    assert f"batch_size 8 is the largest that fits {format_bytes(limit)}; 9 would need" in text
    assert "--per_device_train_batch_size 8 " in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--max", "batch_size"], r"--max batch_size needs a limit\. Name a card by --gpu"),
        (["--max", "batch_size", "--batch_size", "3", "--fit", "2GiB"], "--batch_size 3 and --max batch_size both"),
        (["--max", "seq_length", "--sweep", "batch_size=1,2", "--fit", "2GiB"], "and --sweep another"),
        (["--max", "seq_length", "--layers_per_group", "auto"], "--layers_per_group auto another"),
    ],
)
def test_what_does_not_go_with_it_is_an_error(words: list[str], part: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=part):
        run_plan(["--model", str(write_config(tmp_path / "model")), *words])
