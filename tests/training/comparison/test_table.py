"""What a comparison says: table, notes and picture of made-up figures."""

import io
from typing import Any

from rich.console import Console

from slivertune.training.comparison.comparison import RowResult
from slivertune.training.comparison.figure import comparison_figure
from slivertune.training.comparison.outcome import Outcome, best_of
from slivertune.training.comparison.rows import Row
from slivertune.training.comparison.table import comparison_table, notes


def outcome(loss: float, *, seed: int = 0, rate: float = 1e-3, **more: Any) -> Outcome:
    values: dict[str, Any] = {
        "num_updates": 100,
        "seconds": 20.0,
        "num_tokens": 4000.0,
        "before": {"eval_loss": 3.0},
        "after": {"eval_loss": loss},
        "peak_bytes": {"device": 3 * 2**20, "host": 2**20},
        "curve": ([0.0, 50.0, 100.0], [3.0, 2.5, loss]),
        **more,
    }
    return Outcome(rate=rate, seed=seed, **values)


def result(name: str, *outcomes: Outcome, rates: dict[float, Outcome] | None = None, failure: str | None = None) -> Any:
    first = {outcomes[0].rate: outcomes[0]} if outcomes else {}
    row = Row(name=name, options=("--method", name))
    return RowResult(row=row, rates=rates or first, outcomes=outcomes, failure=failure)


def shown(results: list[RowResult]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_table(results, "equal steps"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_means_ranges_and_differences_of_the_seeds_that_both_have() -> None:
    dense = result("dense", outcome(2.0, seed=0), outcome(2.2, seed=1))
    hift = result("hift", outcome(2.1, seed=0), outcome(2.5, seed=1, seconds=40.0), outcome(9.0, seed=2))
    first, second = shown([dense, hift])
    assert first == ["dense", "0.001", "100", "20.0", "2.1000 (2.0000 to 2.2000)", "", "3.00 MiB", "1.00 MiB", "200"]
    assert second[4:6] == ["4.5333 (2.1000 to 9.0000)", "+0.2000"]


def test_accuracy_is_compared_where_there_is_one_and_more_is_better() -> None:
    low, high = (outcome(1.0, after={"eval_loss": 1.0, "eval_accuracy": share}, rate=share) for share in (0.5, 0.75))
    assert best_of([low, high]) is high
    assert shown([result("dense", low), result("hift", high)])[1][4:6] == ["75.00%", "+25.00%"]


def test_the_lowest_loss_is_best_and_what_is_no_number_never_is() -> None:
    runs = [outcome(float("nan"), rate=1.0), outcome(2.0, rate=2.0), outcome(1.5, rate=3.0)]
    assert best_of(runs).rate == 3.0


def test_what_failed_stands_there_and_says_why() -> None:
    results = [result("dense", outcome(2.0)), result("lora", failure="it broke")]
    assert shown(results)[1][:2] == ["lora", "failed"]
    assert "lora failed: it broke" in notes(results, is_searched=False)


def test_notes_name_what_may_mislead() -> None:
    best, worse = outcome(1.0, rate=1e-3), outcome(2.0, rate=1e-4)
    middle = result("hift", best, rates={1e-4: worse, 1e-3: best, 1e-2: outcome(3.0, rate=1e-2)})
    edge = result("dense", best, rates={1e-4: worse, 1e-3: best})
    said = "\n".join(notes([edge, middle], is_searched=True))
    assert "the largest or the smallest tried: dense. Search further" in said
    assert "not searched" not in said and "one seed" in said


def test_the_picture_has_each_rows_losses_by_updates_by_seconds_and_by_bytes() -> None:
    figure = comparison_figure([result("dense", outcome(2.0)), result("hift", failure="x")], "title")
    by_update, by_second, by_byte = figure.axes
    (line,) = by_update.get_lines()
    assert list(line.get_xdata()) == [0, 50, 100] and list(line.get_ydata()) == [3.0, 2.5, 2.0]
    assert list(by_second.get_lines()[0].get_xdata()) == [0, 10, 20]
    assert list(by_byte.get_lines()[0].get_xdata()) == [3 * 2**20 / 1e6]
    assert list(by_byte.get_lines()[0].get_ydata()) == [2.0]
