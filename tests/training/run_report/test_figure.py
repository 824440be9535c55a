from pathlib import Path
from typing import Any

import pytest

from slivertune.training.run_report.figure import decimal_unit, run_figure
from slivertune.training.run_report.run_log import read_run_log
from tests.training.run_report.made_logs import LOG, evaluation, line, write_run, write_state

STEPS = [10, 20, 30]


def drawn(folder: Path) -> dict[str, Any]:
    """The panels by their titles."""
    return {axes.get_title(loc="left"): axes for axes in run_figure(read_run_log(folder)).axes}


def points(axes: Any, label: str) -> list[tuple[float, float]]:
    (found,) = (each for each in axes.lines if each.get_label() == label)
    return list(zip(found.get_xdata(), found.get_ydata(), strict=True))


def test_what_is_drawn_is_what_the_log_has(tmp_path: Path) -> None:
    panels = drawn(write_run(tmp_path))
    assert points(panels["loss"], "training") == [(step, 2 + 1 / step) for step in STEPS]
    assert points(panels["loss"], "evaluation") == [(0, 3.0), (10, 2.5), (20, 1.5), (30, 0.5)]
    assert points(panels["learning rate"], "applied") == [(step, 1e-3 / step) for step in STEPS]
    assert points(panels["learning rate"], "of the schedule") == [(step, 2e-3 / step) for step in STEPS]
    assert points(panels["group of the last update of each line, 0 at the bottom"], "group") == [
        (10, 1),
        (20, 2),
        (30, 3),
    ]
    assert points(panels["gradient norm, before clipping"], "norm") == [(step, 0.1 * step) for step in STEPS]
    assert points(panels["tokens/s"], "measured") == [(step, 800 + step) for step in STEPS]
    assert set(points(panels["tokens/s"], "planned")) == {(0, 900.0), (1, 900.0)}
    state = panels["optimizer state between two updates (MB)"]
    assert points(state, "host") == [(step, step / 10) for step in STEPS]
    assert len(state.lines) == 1, "nothing lies on the device or on disk"
    peaks = panels["memory at the peak of updates (MB)"]
    assert [text.get_text() for text in peaks.texts] == ["planned 9.0", "planned 5.0", "measured 8.0", "measured 4.0"]
    assert [bar.get_width() for bar in peaks.patches] == [9.0, 5.0, 8.0, 4.0]
    assert [label.get_text() for label in peaks.get_yticklabels()] == ["device", "host"]


def test_a_run_without_evaluation_results_or_our_own_numbers_has_fewer_panels(tmp_path: Path) -> None:
    write_state(tmp_path, [{"loss": 1.0, "learning_rate": 0.5, "step": 1}, {"loss": 0.5, "step": 2}], 2)
    panels = drawn(tmp_path)
    assert list(panels) == ["loss", "learning rate"]
    assert points(panels["loss"], "training") == [(1, 1.0), (2, 0.5)]
    assert len(panels["loss"].lines) == 1
    assert run_figure(read_run_log(tmp_path))._suptitle.get_text() == f"{tmp_path}, until step 2"  # type: ignore[attr-defined]


def test_sfts_reselections_are_drawn(tmp_path: Path) -> None:
    log = [{"loss": 1.0, "sft/reselections": count, "step": count + 1} for count in range(4)]
    write_state(tmp_path, log, 4)
    assert points(drawn(tmp_path)["reselections so far"], "reselections") == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_run_that_was_resumed_is_one_line_to_its_end(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_state(tmp_path / "checkpoint-50", [*LOG, line(40), evaluation(40, 1.0), line(50)], 50)
    panels = drawn(tmp_path)
    assert points(panels["loss"], "training") == [(step, 2 + 1 / step) for step in (10, 20, 30, 40, 50)]
    assert points(panels["loss"], "evaluation") == [(10, 2.5), (20, 1.5), (40, 1.0)]
    assert panels["loss"].get_xlim() == (0, 51)


@pytest.mark.parametrize(("largest", "unit"), [(2e9, "GB"), (5e6, "MB"), (2e5, "MB"), (900, "kB")])
def test_sizes_have_a_unit_that_can_be_read(largest: float, unit: str) -> None:
    assert decimal_unit(largest)[0] == unit
