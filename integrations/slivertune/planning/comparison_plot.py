"""Chart of a comparison: memory by parts, and tokens/s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slivertune.planning.byte_text import common_unit, format_bytes
from slivertune.planning.compare import Comparison
from slivertune.planning.plot import COLOURS, LIMIT_COLOUR, style_axes, style_of_allowance
from slivertune.planning.report import PART_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_HEIGHT = 0.66


def comparison_figure(comparison: Comparison) -> Figure:
    """Draw a bar of memory and a bar of speed for each row that could be planned, the fastest on top.

    Args:
        comparison: Comparison to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    question = comparison.question
    num_rows = sum(row.requirement is not None for row in comparison.rows)
    figure = Figure(figsize=(11, 1.8 + 0.34 * max(num_rows, 4)), layout="constrained")
    FigureCanvasAgg(figure)
    memory, speed = figure.subplots(1, 2, sharey=True)
    _draw_memory(memory, comparison)
    _draw_speed(speed, comparison)
    lengths = {row.requirement.plan.request.seq_length for row in comparison.rows if row.requirement is not None}
    tokens = "".join(f", {length:,} tokens per sequence" for length in lengths)
    figure.suptitle(
        f"{question.model.name} on a {question.card.name}{tokens}: planned, the largest batch that fits", fontsize=10
    )
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw_memory(axes: Axes, comparison: Comparison) -> None:
    rows = [(row, row.requirement) for row in comparison.rows if row.requirement is not None]
    limit = comparison.question.limits.device_bytes
    unit, size = common_unit(max([limit, *(need.device_bytes for _, need in rows)]))
    places, base = range(len(rows)), [0.0] * len(rows)
    for kind, name in PART_TITLES.items():
        widths = [getattr(need.plan.peak, kind) / size for _, need in rows]
        axes.barh(places, widths, height=_BAR_HEIGHT, left=base, color=COLOURS[kind], label=name)
        base = [low + width for low, width in zip(base, widths, strict=True)]
    widths = [need.allowance.total / size for _, need in rows]
    axes.barh(places, widths, height=_BAR_HEIGHT, left=base, label="allowance", **style_of_allowance())
    axes.axvline(limit / size, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2, label=f"limit, {format_bytes(limit)}")
    axes.set_yticks(places, [f"{row.title}, batch {need.plan.request.batch_size}" for row, need in rows])
    axes.invert_yaxis()
    # A run that does not fit may need many times the limit. Cut its bar at twice the limit.
    axes.set_xlim(0, min(max(need.device_bytes for _, need in rows), 2 * limit) / size if rows else 1)
    axes.set_xlabel(f"memory of the GPU at the peak ({unit})")
    style_axes(axes, "x")


def _draw_speed(axes: Axes, comparison: Comparison) -> None:
    rows = [row for row in comparison.rows if row.requirement is not None]
    fastest = max([row.speed for row in rows], default=0.0) or 1.0
    axes.barh(range(len(rows)), [row.speed for row in rows], height=_BAR_HEIGHT, color=COLOURS["parameters"])
    for place, row in enumerate(rows):
        text = "does not fit" if row.time is None else f"{row.speed:,.0f}"
        colour = LIMIT_COLOUR if row.time is None else "#333333"
        axes.text(row.speed + 0.01 * fastest, place, text, va="center", fontsize=9, color=colour)
    axes.set_xlim(0, 1.15 * fastest)
    axes.set_xlabel("tokens/s")
    style_axes(axes, "x")
