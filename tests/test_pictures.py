"""The pictures of the pages, at the width in which a page shows them: legible, labelled, of few rows."""

import re
import sys
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from matplotlib.text import Text
from PIL import Image

from tests.conftest import CHECKOUT

sys.path.append(str(CHECKOUT / "benchmarks"))
from evidence_tables import ASKED
from tables import PICTURES

IMAGES = CHECKOUT / "docs" / "images"
SMALLEST_POINTS = {"fixed_batch.png": 11}
"""README's picture is also read on a phone; others have at least 8."""
UNIT = re.compile(r"\((GiB|tokens/s|%|nats per token)\)|, GiB$|^Tokens/s ")


@cache
def drawn(name: str) -> Any:
    figures, draw = PICTURES[name]
    figure = draw(figures())
    figure.canvas.draw()
    return figure


def texts_of(figure: Any) -> list[Text]:
    """Texts that are seen, but for ticks beyond the ends of an axis."""
    hidden = {
        id(label)
        for axes in figure.axes
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not (min(low, high) <= tick.get_loc() <= max(low, high)) or not label.get_visible()
    }
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and id(text) not in hidden]


def test_each_picture_of_the_pages_is_drawn_from_the_results() -> None:
    assert {path.name for path in IMAGES.iterdir()} == PICTURES.keys()


@pytest.mark.parametrize("name", PICTURES)
def test_text_is_legible_at_the_width_of_a_page(name: str) -> None:
    width, height = drawn(name).get_size_inches()
    points = 900 / 96 / width  # at 96 pixels per inch, a point of the figure on a page of 900 pixels
    sizes = {text.get_text(): points * text.get_fontsize() for text in texts_of(drawn(name))}
    assert [text for text, size in sizes.items() if size < SMALLEST_POINTS.get(name, 8)] == []
    with Image.open(IMAGES / name) as picture:
        assert picture.width >= 1800
        assert picture.height / picture.width == pytest.approx(height / width, rel=0.01)


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_cut_off_or_covers_another(name: str) -> None:
    boxes = {text: text.get_window_extent() for text in texts_of(drawn(name))}
    canvas = drawn(name).bbox
    outside = [text.get_text() for text, box in boxes.items() if not (canvas.x0 <= box.x0 and box.x1 <= canvas.x1)]
    covered = [
        (one.get_text(), other.get_text())
        for (one, here), (other, there) in combinations(boxes.items(), 2)
        if here.overlaps(there)
    ]
    assert (outside, covered) == ([], [])


@pytest.mark.parametrize("name", PICTURES)
def test_each_panel_has_a_unit_and_at_most_eight_rows(name: str) -> None:
    for axes in drawn(name).axes:
        assert UNIT.search(" ".join((axes.get_xlabel() or axes.get_title()).split()))
        assert 2 < len(axes.get_yticks()) <= 8
    for legend in drawn(name).legends:
        assert len(legend.get_texts()) <= 8


@pytest.mark.parametrize("task", ASKED["tasks"])
def test_rows_of_hift_are_named_by_their_options(task: str) -> None:
    picture = ASKED["tasks"][task]["picture"]
    (steps,) = re.findall(r"HiFT: (\d+) steps? per group", picture["title"])
    rows = {row: name for row, name in picture["rows"].items() if name.startswith("HiFT")}
    assert rows and not any(row.endswith(("-x2", "-x4")) for row in picture["rows"])  # all after as many updates
    for row, name in rows.items():
        (layers,) = re.findall(r"(\d+) of 8 layers", name)
        way = "--preset paper" if steps == "1" else f"--steps_per_group {steps} --order random"
        options = ASKED["rows"][row]
        assert f"--layers_per_group {layers}" in options and way in options
        assert ("default" in name) == (layers == "2" and steps == "20")
