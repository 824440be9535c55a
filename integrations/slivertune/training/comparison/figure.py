"""Picture of a comparison: loss against updates, against seconds, and against peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slivertune.planning.plot import make_figure, style_axes
from slivertune.training.comparison.comparison import RowResult
from slivertune.training.comparison.outcome import Outcome
from slivertune.training.run_report.figure import decimal_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind people can tell apart, too.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_MARKERS = "osD^vP*X"


def comparison_figure(results: Sequence[RowResult], title: str) -> Figure:
    """Draw the rows that have outcomes, each with its first seed.

    Args:
        results: Results of all rows.
        title: Description of the equal budget.
    """
    figure = make_figure(13, 4.6)
    by_update, by_second, by_byte = figure.subplots(1, 3)
    drawn = [(place, each.row.name, each.outcomes[0]) for place, each in enumerate(results) if each.outcomes]
    for place, name, outcome in drawn:
        colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
        steps, losses = outcome.curve
        style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        by_update.plot(steps, losses, label=name, **style)
        if outcome.seconds is not None:
            each = outcome.seconds / outcome.num_updates
            by_second.plot([step * each for step in steps], losses, **style)
    _draw_memory(by_byte, drawn)
    for axes, name in ((by_update, "updates"), (by_second, "seconds of updates")):
        axes.set_xlabel(name, fontsize=9)
        axes.set_ylabel("evaluation loss", fontsize=9)
    for axes in (by_update, by_second, by_byte):
        style_axes(axes, "y")
    figure.suptitle(title, fontsize=10)
    labels = by_update.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_memory(axes: Axes, drawn: Sequence[tuple[int, str, Outcome]]) -> None:
    known = [(place, outcome) for place, _, outcome in drawn if "device" in outcome.peak_bytes]
    unit, size = decimal_unit(max([outcome.peak_bytes["device"] for _, outcome in known], default=1))
    for place, outcome in known:
        axes.plot(
            outcome.peak_bytes["device"] / size,
            outcome.after[outcome.metric],
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=8,
            linestyle="",
        )
    axes.set_xlim(left=0)
    axes.margins(0.15)
    axes.set_xlabel(f"peak on the device ({unit})", fontsize=9)
    metric = drawn[0][2].metric.removeprefix("eval_") if drawn else "loss"
    axes.set_ylabel(f"evaluation {metric} at the end", fontsize=9)
