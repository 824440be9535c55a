"""Picture of a run's log, with a panel for each quantity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slivertune.interop.training_metrics import SCHEDULED_LR, TOKENS_PER_SECOND
from slivertune.planning.plot import LIMIT_COLOUR, make_figure, style_axes
from slivertune.training.run_report.run_log import Points, RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Axes", RunLog], None]

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"
PLACES = {"device": BLUE, "host": ORANGE, "disk": GREEN}
"""Place of memory -> its colour."""
_FEWEST_BARS = 2
"""Minimum number of bars for which room is left, so that fewer bars are not wider."""
_MARKED_UP_TO = 60
"""Maximum number of points of a line for which each point is marked."""


def run_figure(log: RunLog) -> Figure:
    """Draw the quantities in a run's log.

    Args:
        log: Log of the run.
    """
    panels = _panels(log)
    num_rows = -(-len(panels) // 2)
    figure = make_figure(11, 0.9 + 2.6 * num_rows)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(num_rows, 2, place + 1)
        panel(axes, log)
        style_axes(axes, "x" if panel is _draw_peaks else "y")
        if panel is not _draw_peaks:
            axes.set_xlim(0, 1.02 * log.entries[-1]["step"])
    figure.suptitle(_title(log), fontsize=11)
    return figure


def _title(log: RunLog) -> str:
    results = log.results
    if not results:
        return f"{log.folder}, until step {int(log.entries[-1]['step'])}"
    return f"{results['method']}: {results['num_steps']} updates of {results['model']} on {results['dataset']}"


def _panels(log: RunLog) -> list[Panel]:
    names = {name for entry in log.entries for name in entry}
    places = (f"memory/state_{place}_bytes" for place in PLACES)
    asked: tuple[tuple[Panel, bool], ...] = (
        (_draw_loss, True),
        (_draw_rate, "learning_rate" in names),
        (_draw_group, "hift/group" in names),
        (_draw_reselections, "sft/reselections" in names),
        (_draw_norm, "grad_norm" in names),
        (_draw_speed, TOKENS_PER_SECOND in names),
        (_draw_state, any(any(log.series(name)[1]) for name in places)),
        (_draw_peaks, bool(measured_bytes(log.results))),
    )
    return [panel for panel, is_known in asked if is_known]


def _line(axes: Axes, points: Points, label: str, colour: str, **options: Any) -> None:
    marker = "." if len(points[0]) <= _MARKED_UP_TO else ""
    axes.plot(*points, label=label, color=colour, **{"marker": marker, "linewidth": 1.4, **options})


def _begin_at_zero(axes: Axes) -> None:
    highest = float(axes.dataLim.ymax)
    axes.set_ylim(0, 1.1 * highest if highest > 0 else 1)


def _finish(axes: Axes, title: str, *, legend: bool = False) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("update", fontsize=9)
    if legend:
        axes.legend(frameon=False, fontsize=8)


def _draw_loss(axes: Axes, log: RunLog) -> None:
    _line(axes, log.series("loss"), "training", BLUE)
    evaluated = log.evaluations("eval_loss")
    if evaluated[0]:
        _line(axes, evaluated, "evaluation", LIMIT_COLOUR, marker="o", markersize=4)
    _finish(axes, "loss", legend=True)


def _draw_rate(axes: Axes, log: RunLog) -> None:
    scheduled = log.series(f"hift/{SCHEDULED_LR}")
    if scheduled[0]:
        _line(axes, scheduled, "of the schedule", GREY, linestyle="--", marker="")
    _line(axes, log.series("learning_rate"), "applied", BLUE)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _finish(axes, "learning rate", legend=bool(scheduled[0]))


def _draw_group(axes: Axes, log: RunLog) -> None:
    from matplotlib.ticker import MaxNLocator

    _line(axes, log.series("hift/group"), "group", BLUE, linestyle="", marker=".")
    num_groups = log.results.get("settings", {}).get("num_groups") or 1 + max(log.series("hift/group")[1])
    axes.set_ylim(-0.5, num_groups - 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "group of the last update of each line, 0 at the bottom")


def _draw_reselections(axes: Axes, log: RunLog) -> None:
    from matplotlib.ticker import MaxNLocator

    _line(axes, log.series("sft/reselections"), "reselections", BLUE, drawstyle="steps-post")
    _begin_at_zero(axes)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "reselections so far")


def _draw_norm(axes: Axes, log: RunLog) -> None:
    _line(axes, log.series("grad_norm"), "norm", BLUE)
    _begin_at_zero(axes)
    _finish(axes, "gradient norm, before clipping")


def _draw_speed(axes: Axes, log: RunLog) -> None:
    _line(axes, log.series(TOKENS_PER_SECOND), "measured", BLUE)
    planned = (log.results.get("planned_update") or {}).get("tokens_per_second")
    if planned is not None:
        axes.axhline(planned, label="planned", color=GREY, linestyle="--", linewidth=1.2)
    _begin_at_zero(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _finish(axes, "tokens/s", legend=planned is not None)


def _draw_state(axes: Axes, log: RunLog) -> None:
    series = {place: log.series(f"memory/state_{place}_bytes") for place in PLACES}
    unit, size = decimal_unit(max(max(values, default=0) for _, values in series.values()))
    for place, (steps, values) in series.items():
        if any(values):
            _line(axes, (steps, [value / size for value in values]), place, PLACES[place])
    _begin_at_zero(axes)
    _finish(axes, f"optimizer state between two updates ({unit})", legend=True)


def _draw_peaks(axes: Axes, log: RunLog) -> None:
    measured, planned = measured_bytes(log.results), planned_bytes(log.results)
    unit, size = decimal_unit(max([*measured.values(), *planned.values()]))
    hatched: dict[str, Any] = {"hatch": "///", "alpha": 0.55, "edgecolor": "white"}
    plain: dict[str, Any] = {}
    for offset, label, found, style in ((-0.2, "planned", planned, hatched), (0.2, "measured", measured, plain)):
        for row, place in enumerate(measured):
            if place in found:
                width = found[place] / size
                axes.barh(row + offset, width, height=0.36, color=PLACES[place], **style)
                axes.annotate(
                    f"{label} {width:,.1f}",
                    (width, row + offset),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
    axes.set_yticks(range(len(measured)), list(measured))
    axes.set_ylim(max(len(measured), _FEWEST_BARS) - 0.5, -0.5)
    axes.margins(x=0.3)
    _finish(axes, f"memory at the peak of updates ({unit})")
    axes.set_xlabel("")


def measured_bytes(results: dict[str, Any]) -> dict[str, int]:
    """Return the highest number of bytes of a run in each place, without places that it did not use.

    Args:
        results: Contents of its `results.json`.
    """
    highest = results.get("highest_bytes") or {}
    found = {"device": results.get("measured_peak_bytes"), "host": highest.get("host"), "disk": highest.get("disk")}
    return {place: num_bytes for place, num_bytes in found.items() if num_bytes}


def planned_bytes(results: dict[str, Any]) -> dict[str, int]:
    """Return the planned number of bytes in each place, or an empty dict if nothing was planned.

    Args:
        results: Contents of a run's `results.json`.
    """
    found = {place: results.get(f"planned_{name}_bytes") for place, name in _PLANNED_AS.items()}
    return {place: num_bytes for place, num_bytes in found.items() if num_bytes}


_PLANNED_AS = {"device": "peak", "host": "host", "disk": "disk"}


def decimal_unit(largest: float) -> tuple[str, float]:
    """Choose the unit of sizes, as in the results of a run.

    Args:
        largest: The largest size, in bytes.

    Returns:
        Name of the unit, and its size in bytes.
    """
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6) if largest >= 1e5 else ("kB", 1e3)
