"""Chart of a comparison: memory by parts, and tokens/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slivertune.core.byte_text import common_unit, format_bytes
from slivertune.planning.compare import Comparison
from slivertune.planning.plot import COLOURS, LIMIT_COLOUR, PAGE_WIDTH, make_figure, style_axes, style_of_allowance
from slivertune.planning.report import PART_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_HEIGHT = 0.66
_POINTS = 9
"""Size of text, in points."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Row of the chart."""

    title: str
    part_bytes: Mapping[str, int]
    """Bytes at the peak, by the kinds of `PART_TITLES`."""
    allowance_bytes: int
    tokens_per_second: float | None
    """Planned speed. None if the run does not fit."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the peak and its allowance."""
        return sum(self.part_bytes.values()) + self.allowance_bytes


def comparison_figure(comparison: Comparison) -> Figure:
    """Draw a bar of memory and a bar of speed for each row that could be planned, the fastest on top.

    Args:
        comparison: Comparison to draw.
    """
    question = comparison.question
    planned = [(row, row.requirement) for row in comparison.rows if row.requirement is not None]
    bars = [
        Bar(
            title=f"{row.title}, batch {need.plan.request.batch_size}",
            part_bytes={kind: getattr(need.plan.peak, kind) for kind in PART_TITLES},
            allowance_bytes=need.allowance.total,
            tokens_per_second=None if row.time is None else row.speed,
        )
        for row, need in planned
    ]
    lengths = {need.plan.request.seq_length for _, need in planned}
    tokens = "".join(f", {length:,} tokens per sequence" for length in lengths)
    return bars_figure(
        bars,
        limit_bytes=question.limits.device_bytes,
        title=f"{question.model.name} on a {question.card.name}{tokens}: planned, the largest batch that fits",
    )


def bars_figure(bars: Sequence[Bar], *, limit_bytes: int, title: str) -> Figure:
    """Draw a bar of memory and a bar of speed for each row.

    Args:
        bars: Rows to draw, from top to bottom.
        limit_bytes: Memory of the GPU, in bytes.
        title: Title of the chart.
    """
    figure = make_figure(PAGE_WIDTH, 1.6 + 0.3 * max(len(bars), 4))
    memory, speed = figure.subplots(1, 2, sharey=True)
    _draw_memory(memory, bars, limit_bytes)
    _draw_speed(speed, bars)
    for axes in (memory, speed):
        axes.tick_params(labelsize=_POINTS)
        axes.xaxis.label.set_fontsize(_POINTS)
        style_axes(axes, "x")
    figure.suptitle(title, fontsize=_POINTS + 1)
    handles = memory.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=_POINTS)
    return figure


def _draw_memory(axes: Axes, bars: Sequence[Bar], limit_bytes: int) -> None:
    longest = max((bar.device_bytes for bar in bars), default=0)
    unit, size = common_unit(max(limit_bytes, longest))
    # A run that does not fit may need many times the limit. Cut its bar at twice the limit.
    cut = 2 * limit_bytes / size
    places, base = range(len(bars)), [0.0] * len(bars)
    parts = {name: [bar.part_bytes[kind] / size for bar in bars] for kind, name in PART_TITLES.items()}
    parts["allowance"] = [bar.allowance_bytes / size for bar in bars]
    styles: dict[str, dict[str, Any]] = {name: {"color": COLOURS[kind]} for kind, name in PART_TITLES.items()}
    styles["allowance"] = style_of_allowance()
    for name, widths in parts.items():
        ends = [min(low + width, cut) for low, width in zip(base, widths, strict=True)]
        shown = [end - low for low, end in zip(base, ends, strict=True)]
        axes.barh(places, shown, height=_BAR_HEIGHT, left=base, label=name, **styles[name])
        base = ends
    axes.axvline(
        limit_bytes / size,
        color=LIMIT_COLOUR,
        linestyle="--",
        linewidth=1.2,
        label=f"limit, {format_bytes(limit_bytes)}",
    )
    for place, bar in enumerate(bars):
        if bar.device_bytes > 2 * limit_bytes:
            _mark_cut(axes, cut, place, f"{bar.device_bytes / size:,.1f} {unit}")
    axes.set_yticks(places, [bar.title for bar in bars])
    axes.invert_yaxis()
    # Leave room for the number beside a cut bar.
    axes.set_xlim(0, 1.3 * cut if longest > 2 * limit_bytes else 1.03 * max(longest, limit_bytes) / size)
    axes.set_xlabel(f"memory of the GPU at the peak ({unit})")


def _mark_cut(axes: Axes, cut: float, place: int, text: str) -> None:
    """Break a cut bar by two slanted gaps, and write its whole length at its end."""
    half = _BAR_HEIGHT / 2
    for share in (0.93, 0.96):
        low, high = share * cut, (share + 0.015) * cut
        axes.plot([low, high], [place + half, place - half], color="white", linewidth=2)
    axes.text(1.01 * cut, place, text, va="center", fontsize=_POINTS, color=LIMIT_COLOUR)


def _draw_speed(axes: Axes, bars: Sequence[Bar]) -> None:
    speeds = [bar.tokens_per_second or 0.0 for bar in bars]
    fastest = max(speeds, default=0.0) or 1.0
    axes.barh(range(len(bars)), speeds, height=_BAR_HEIGHT, color=COLOURS["parameters"])
    for place, (bar, speed) in enumerate(zip(bars, speeds, strict=True)):
        fits = bar.tokens_per_second is not None
        text, colour = (f"{speed:,.0f}", "#333333") if fits else ("does not fit", LIMIT_COLOUR)
        axes.text(speed + 0.01 * fastest, place, text, va="center", fontsize=_POINTS, color=colour)
    axes.set_xlim(0, 1.15 * fastest)
    axes.set_xlabel("speed (tokens/s)")
