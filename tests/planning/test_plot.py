import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest

from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.plot import draw, groups_figure, require_matplotlib, sweep_figure
from tests.planning.made import GIB, tiny_model
from tests.planning.test_report import REQUIREMENT, sweep


def stacked(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """Bottom and top of each bar, by the name of its part."""
    (axes,) = figure.axes
    return {
        bars.get_label(): [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in bars] for bars in axes.containers
    }


def test_a_sweep_is_drawn_as_the_parts_of_each_peak_on_top_of_each_other_with_the_limit() -> None:
    answer = sweep()
    figure: Any = sweep_figure(answer)
    (axes,) = figure.axes
    bars = stacked(figure)
    assert list(bars) == ["weights", "gradients", "masters and optimizer state", "activations and other", "allowance"]
    assert bars["weights"] == [(0, 1), (0, 1)]
    assert bars["activations and other"] == [(1, 1.5), (1, 3)]
    for place, (_, requirement) in enumerate(answer.requirements):
        assert bars["allowance"][place][1] == pytest.approx(requirement.device_bytes / GIB)
    (limit,) = axes.lines
    assert limit.get_ydata()[0] == 2.25 and limit.get_label() == "limit, 2.25 GiB"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "2,048"]
    assert axes.get_ylabel() == "memory of one GPU at the peak (GiB)"
    assert axes.get_xlabel() == "seq_length (tokens)"
    over, under = axes.texts[1].get_color(), axes.texts[0].get_color()
    assert over == limit.get_color() != under, "what does not fit is written in the limit's colour"
    assert axes.get_ylim()[1] > 3 + REQUIREMENT.allowance.total / GIB / 2


def test_a_plan_is_drawn_by_its_distinct_groups() -> None:
    figure: Any = groups_figure(Answer(model=tiny_model(), requirement=REQUIREMENT))
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["embedding", "model.layers.0\n(and 31 alike)"]
    assert stacked(figure)["weights"] == [(0, 12), (0, 12)]
    assert axes.lines == [] or len(axes.lines) == 0


@pytest.mark.parametrize(
    "answer", [sweep(), Answer(model=tiny_model(), requirement=REQUIREMENT)], ids=["sweep", "groups"]
)
def test_the_file_is_a_png_of_some_size(answer: Answer | SweepAnswer, tmp_path: Path) -> None:
    draw(answer, tmp_path / "plan.png")
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000 and height > 700


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs matplotlib, which is missing\. Run pip install matplotlib"):
        require_matplotlib()
