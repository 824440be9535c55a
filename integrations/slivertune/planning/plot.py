"""Plots of the parts of a peak: by value of a swept field, or by group."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slivertune.core.atomic import atomic_file
from slivertune.core.byte_text import common_unit, format_bytes
from slivertune.core.missing_library import missing_library
from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.methods import planned
from slivertune.planning.plan import Moment
from slivertune.planning.report import PART_TITLES, describe_request

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind people can tell apart.
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "state": "#009E73", "residual": "#CC79A7"}
_ALLOWANCE_COLOUR = "#777777"
LIMIT_COLOUR = "#D55E00"
_BAR_WIDTH = 0.62
_FEWEST_PLACES = 4
"""Number of bars that fill the width. Fewer bars are drawn as slim as these."""
_LINE_CHARACTERS = 88
_DOTS_PER_INCH = 150
PAGE_WIDTH = 900 / 96
"""Inches of a chart on a page of 900 px, where text then has its size in points."""


def require_matplotlib(asked: str = "--plot") -> None:
    """Check that matplotlib is installed, before anything is planned.

    Args:
        asked: Option that needs it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(missing_library(asked, "matplotlib"))


def draw(answer: Answer | SweepAnswer, path: Path) -> None:
    """Draw an answer.

    Args:
        answer: Answer to draw.
        path: PNG file to write.

    Raises:
        OSError: If the file can't be written; an older file then stays intact.
    """
    save(sweep_figure(answer) if isinstance(answer, SweepAnswer) else groups_figure(answer), path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure.

    Args:
        figure: Figure to write.
        path: PNG file to write.

    Raises:
        OSError: If the file can't be written; an older file then stays intact.
    """
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=_DOTS_PER_INCH)


def sweep_figure(answer: SweepAnswer) -> Figure:
    """Draw the parts of the peak and the allowance for each value, and the limit as a line.

    Args:
        answer: Answer to draw.
    """
    requirements = [requirement for _, requirement in answer.requirements]
    labels = [_value_label(answer.field, value) for value, _ in answer.requirements]
    return _figure(
        labels=labels,
        moments=[requirement.plan.peak for requirement in requirements],
        allowances=[requirement.allowance.total for requirement in requirements],
        limit=None if answer.limits is None else answer.limits.device_bytes,
        title=f"{requirements[0].plan.request.method} on {answer.model.name}",
        subtitle=describe_request(requirements[0].plan.request, without=answer.field),
        x_label=f"{answer.field}{_unit_of_field(answer.field)}",
    )


def groups_figure(answer: Answer) -> Figure:
    """Draw the parts of each distinct group's peak, or of the only peak of a method without groups.

    Args:
        answer: Answer to draw.
    """
    plan = answer.requirement.plan
    labels = [
        group.name if len(group.indices) == 1 else f"{group.name}\n(and {len(group.indices) - 1} alike)"
        for group in plan.groups
    ]
    return _figure(
        labels=labels,
        moments=[group.peak for group in plan.groups],
        allowances=[answer.requirement.allowance.total] * len(labels),
        limit=None if answer.limits is None else answer.limits.device_bytes,
        title=f"{plan.request.method} on {answer.model.name}",
        subtitle=describe_request(plan.request),
        x_label="group that trains" if planned(plan.request.method).trains_in_groups else "update",
    )


def _figure(
    *,
    labels: Sequence[str],
    moments: Sequence[Moment],
    allowances: Sequence[int],
    limit: int | None,
    title: str,
    subtitle: str,
    x_label: str,
) -> Figure:
    totals = [moment.total + allowance for moment, allowance in zip(moments, allowances, strict=True)]
    unit, size = common_unit(max(totals))
    figure = make_figure(max(7.5, 1.5 + 1.1 * len(labels)), 5.4)
    axes = figure.add_subplot()
    _stack(axes, moments, allowances, size)
    _mark(axes, totals, limit, size)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(f"memory of one GPU at the peak ({unit})")
    axes.set_xlabel(x_label)
    axes.set_title("\n".join((title, *textwrap.wrap(subtitle, _LINE_CHARACTERS))), loc="left", fontsize=10)
    style_axes(axes, "y")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, moments: Sequence[Moment], allowances: Sequence[int], size: int) -> None:
    places = range(len(moments))
    width = _BAR_WIDTH * min(1.0, len(moments) / _FEWEST_PLACES)
    base = [0.0] * len(moments)
    for kind, name in PART_TITLES.items():
        heights = [getattr(moment, kind) / size for moment in moments]
        axes.bar(places, heights, width=width, bottom=base, color=COLOURS[kind], label=name)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.bar(
        places,
        [allowance / size for allowance in allowances],
        width=width,
        bottom=base,
        label="allowance",
        **style_of_allowance(),
    )


def make_figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no display.

    Args:
        width: Inches.
        height: Inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_of_allowance() -> dict[str, Any]:
    """Return the style of bars that are not planned."""
    return {"color": "white", "edgecolor": _ALLOWANCE_COLOUR, "hatch": "////", "linewidth": 0}


def style_axes(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Remove the top and right frame lines, and draw a light grid behind the data.

    Args:
        axes: Axes to style.
        grid: Axis whose values are read.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis=grid, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def _mark(axes: Axes, totals: Sequence[int], limit: int | None, size: int) -> None:
    """Write each total over its bar, in the limit's colour if it is too large, and draw the limit."""
    for place, total in enumerate(totals):
        axes.annotate(
            f"{total / size:,.1f}",
            (place, total / size),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color="#333333" if limit is None or total <= limit else LIMIT_COLOUR,
        )
    top = max(totals)
    if limit is not None:
        axes.axhline(
            limit / size, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2, label=f"limit, {format_bytes(limit)}"
        )
        top = max(top, limit)
    axes.set_ylim(0, 1.1 * top / size)


def _value_label(field: str, value: Any) -> str:
    if field.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _unit_of_field(field: str) -> str:
    return {"seq_length": " (tokens)", "batch_size": " (sequences)", "stream_bytes": ""}.get(field, "")
