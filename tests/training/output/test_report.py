import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slivertune.core.ledger import Census
from slivertune.planning.cards import card_named
from slivertune.planning.planned_time import PlannedTime
from slivertune.planning.time_formula import MeanUpdate
from slivertune.training.output.largest_batch import BatchSize
from slivertune.training.output.report import Results, Sample, print_results, write_results
from slivertune.training.trial import Trial

RESULTS = Results(
    method="hift",
    model="some/model",
    dataset="rows [odd].csv",
    num_parameters=7,
    num_trained=3,
    device="cpu",
    world_size=1,
    layout="single",
    settings={"seed": 1},
    before={"eval_loss": 2.0, "eval_accuracy": 0.25},
    after={"eval_loss": 1.0, "eval_accuracy": 0.75},
    num_steps=3,
    steps_per_second=1.5,
    num_skipped=2,
    peak=Census(parameters=1_000_000, residual=2_500_000),
    highest=Census(parameters=1_000_000, residual=3_000_000, disk=4_000_000),
    planned_peak_bytes=3_570_000,
    measured_peak_bytes=3_500_000,
    model_folder=Path("runs/hift/model"),
    checkpoint=Path("runs/hift/checkpoint-3"),
    sample=Sample(prompt="[bold]Q", before="no", after="yes", expected="maybe"),
)


def printed(**changes: Any) -> str:
    """The table of these results with some of them changed."""
    out = io.StringIO()
    print_results(replace(RESULTS, **changes), Console(file=out, width=100), Path("results.json"))
    return out.getvalue()


def test_every_figure_is_printed_and_no_text_is_taken_for_markup() -> None:
    text = printed()
    for part in (
        "2.0000", "1.0000", "25.00%", "75.00%", "3.5 MB, planned 3.6 MB (+2.0%)", "3.0 MB", "4.0 MB", "1.50",
        "2 (a loss or gradient",
        "runs/hift/model", "runs/hift/checkpoint-3", "rows [odd].csv", "[bold]Q", "no", "yes", "maybe",
    ):  # fmt: skip
        assert part in text


def test_a_peak_that_prefetched_state_may_fill_is_not_held_against_the_plan() -> None:
    prefetches = {"device": "cuda:0", "settings": {"prefetch_bytes": "auto"}}
    text = " ".join(printed(**prefetches).split())
    assert "3.5 MB with prefetched state, which may fill free memory; planned 3.6 MB without" in text
    assert "3.5 MB, planned 3.6 MB (+2.0%)" in printed(**{**prefetches, "device": "cpu"})
    assert "3.5 MB, planned 3.6 MB (+2.0%)" in printed(device="cuda:0")


@pytest.mark.parametrize(
    ("ran", "text"),
    [
        ((4, 512), "3.5 MB, planned 3.6 MB (+2.0%)"),
        ((4, 231), "3.5 MB, planned 3.6 MB for rows of 512 tokens; the longest that ran had 231"),
        ((2, 512), "3.5 MB, planned 3.6 MB for 4 rows of 512 tokens; the largest batch that ran had 2 of 512"),
    ],
)
def test_a_plan_for_longer_rows_than_ran_says_so_in_place_of_a_share(ran: tuple[int, int], text: str) -> None:
    planned, largest = BatchSize(num_rows=4, num_tokens=512), BatchSize(num_rows=ran[0], num_tokens=ran[1])
    line = " ".join(printed(planned_batch=planned, largest_batch=largest).split())
    assert text in line
    assert ("%)" in line.partition("peak on the device")[2].partition("peak")[0]) == (ran == (4, 512))


def test_what_was_not_measured_is_not_printed() -> None:
    sizes = dict.fromkeys(("peak", "highest", "planned_peak_bytes", "measured_peak_bytes"))
    text = printed(**sizes, checkpoint=None, sample=None, num_skipped=0, steps_per_second=None)
    for part in ("peak", "checkpoint", "Sample", "skipped", "time per step", "tokens/s", "updates/s"):
        assert part not in text


def test_dense_fine_tuning_has_a_column_beside_the_method() -> None:
    highest = {**dict.fromkeys(("parameters", "residual", "host", "host_activations", "disk"), 0), "state": 7_000_000}
    dense = Trial(
        num_updates=16, seconds_per_update=0.5, tokens_per_update=512.0, peak_bytes=9_900_000, num_rows=4,
        accumulation=1, highest_bytes={**highest, "gradients": 6_000_000},
    )  # fmt: skip
    text = printed(dense=dense, tokens_per_second=1600.0)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    by_name = {name: values for name, *values in cells if name}
    assert by_name["peak on the device"] == ["3.5 MB, planned 3.6 MB (+2.0%)", "9.9 MB"]
    assert by_name["peak state on the device"] == ["0.0 MB", "7.0 MB"]
    assert by_name["peak gradients"] == ["0.0 MB", "6.0 MB"]
    assert by_name["tokens/s"] == ["1,600", "1,024"]
    assert by_name["time per step"] == ["666.7 ms/update", "500.0 ms/update"]
    assert by_name["updates/s"] == ["1.50", "2.00"]
    assert "dense" not in printed()


def test_the_time_per_step_is_the_measured_one_whatever_was_planned() -> None:
    dense = Trial(
        num_updates=16, seconds_per_update=1.25, tokens_per_update=512.0, peak_bytes=None, num_rows=4, accumulation=1
    )  # fmt: skip
    planned: dict[str, Any] = {"planned_update": PLANNED_UPDATE, "tokens_per_second": 1600.0}
    for changes in (dict[str, Any](), planned):
        text = printed(dense=dense, **changes)
        (line,) = [line for line in text.splitlines() if "time per step" in line]
        cells = [cell.strip() for cell in line.split("│")[2:-1]]
        assert cells == ["666.7 ms/update", "1,250.0 ms/update"]
        assert "666.7 ms/update" in printed(**changes)


def test_a_measured_peak_without_a_plan_stands_alone() -> None:
    text = printed(planned_peak_bytes=None)
    assert "3.5 MB" in text and "planned" not in text


PLANNED_UPDATE = PlannedTime(
    rates=card_named("4090").rates(),
    update=MeanUpdate(computing={"forward": 0.5}, waiting={}),
    seconds_range=(1.0, 0.4),
    num_tokens=1024,
    weight_share=1.0,
    flops=1e12,
    num_operators=100.0,
    disk_bytes_per_update=0.0,
)


@pytest.mark.parametrize(
    ("planned", "note", "text"),
    [
        (PLANNED_UPDATE, None, "1,600, planned 2,048 (+28.0%)\n"),
        (PLANNED_UPDATE, "from operators alone", "1,600, planned 2,048 (+28.0%), from operators alone\n"),
        (None, "not planned: an odd card", "1,600, not planned: an odd card\n"),
        (None, None, "1,600\n"),
    ],
)
def test_the_measured_speed_has_the_planned_one_beside_it(planned: Any, note: Any, text: str) -> None:
    out = printed(tokens_per_second=1600.0, planned_update=planned, planned_update_note=note)
    lines = [" ".join(line.split()) + "\n" for line in out.splitlines()]
    assert f"tokens/s {text}" in lines
    assert "tokens/s" not in printed(planned_update=planned, planned_update_note=note)


def test_the_file_has_the_planned_update(tmp_path: Path) -> None:
    results = replace(RESULTS, tokens_per_second=1600.0, planned_update=PLANNED_UPDATE)
    values = json.loads(write_results(results, tmp_path).read_text())
    assert values["tokens_per_second"] == 1600.0 and values["planned_update_note"] is None
    assert values["planned_update"] == PLANNED_UPDATE.to_json()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ((), "sharded weights don't hold the deltas"),
        (("--allow_quantized_base",), "4-bit weights can't hold the deltas"),
    ],
)
def test_deltas_without_a_model_come_with_the_command_that_makes_one(
    option: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    command = ("slivertune", "merge", "runs/sft/my delta", *option)
    saved: dict[str, Any] = {"model_folder": None, "delta_folder": Path("runs/sft/my delta"), "merge_command": command}
    text = printed(**saved)
    assert f"not saved, since {reason}" in text and "runs/hift/model" not in text
    assert "slivertune merge 'runs/sft/my delta'" in " ".join(text.split())
    values = json.loads(write_results(replace(RESULTS, **saved), tmp_path).read_text())
    assert [values[name] for name in saved] == [None, "runs/sft/my delta", list(command)]


def test_the_file_has_the_bytes_by_kind(tmp_path: Path) -> None:
    values = json.loads(write_results(RESULTS, tmp_path).read_text())
    assert (values["peak_bytes"]["device"], values["highest_bytes"]["disk"]) == (3_500_000, 4_000_000)
    assert (values["planned_peak_bytes"], values["measured_peak_bytes"]) == (3_570_000, 3_500_000)
    assert (values["sample"]["after"], values["checkpoint"]) == ("yes", "runs/hift/checkpoint-3")
