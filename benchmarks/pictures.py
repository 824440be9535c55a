"""The pictures of README and of the pages; each carries its figures in its metadata.

Sizes of text are points at a width of 900 px. Colours, limit and axes are those of `slivertune plan --plot`.
"""

import statistics
import textwrap
from typing import Any

from slivertune.planning.comparison_plot import Bar, bars_figure
from slivertune.planning.plot import COLOURS, LIMIT_COLOUR, PAGE_WIDTH, make_figure, style_axes

GREY = "#999999"
_METHODS = {
    "dense": GREY,
    "HiFT": COLOURS["parameters"],
    "SFT": LIMIT_COLOUR,
    "LoRA": COLOURS["state"],
    "TokenTune": COLOURS["residual"],
}
"""Colours by the first word of a row's name."""
_AXES = {"loss": (1, "loss (nats per token)"), "accuracy": (100, "accuracy (%)")}
"""Scale and label by figure."""


def draw_fixed_batch(shown: dict[str, dict[str, Any]]) -> Any:
    """Draw three panels of one bar per way: memory of the GPU, memory of the host, tokens/s.

    Args:
        shown: By title: `gpu_bytes`, `host_bytes` (None if unknown), `tokens_per_second`, `weight_tokens_per_second`,
            `is_published`.
    """
    figure = make_figure(PAGE_WIDTH, 5.2)
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.2))
    places = range(len(shown))
    colours = [GREY if each["is_published"] else COLOURS["parameters"] for each in shown.values()]
    for axes, name, title in (
        (panels[0], "gpu_bytes", "GPU memory,\nGiB"),
        (panels[1], "host_bytes", "Offloaded to the\nhost, GiB"),
    ):
        sizes = [(each[name] or 0) / 2**30 for each in shown.values()]
        axes.barh(places, sizes, color=colours)
        for place, (size, each) in enumerate(zip(sizes, shown.values(), strict=True)):
            text = "not published" if each[name] is None else f"{size:.1f}" if size else "0"
            _label(axes, text, (size, place), is_inside=size > 0)
        axes.set(title=title, xlim=(0, 1.15 * max(sizes)))
    panels[0].axvline(24, color=LIMIT_COLOUR, linestyle="--", linewidth=1)
    panels[0].annotate("24 GiB", (24, len(shown) - 0.6), xytext=(3, 0), textcoords="offset points", fontsize=11)
    speeds = panels[2]
    read = [each["tokens_per_second"] for each in shown.values()]
    learned = [each["weight_tokens_per_second"] for each in shown.values()]
    speeds.barh(places, read, color=colours, alpha=0.3)
    speeds.barh(places, learned, 0.45, color=colours)
    for place, (one, all_read) in enumerate(zip(learned, read, strict=True)):
        text = f"{one:,.0f}" if one == all_read else f"{one:,.0f} of {all_read:,.0f}"
        _label(speeds, text, (all_read, place), is_inside=False)
    speeds.set(title="Tokens/s per trained\nweight (dark), read (light)", xlim=(0, 1.32 * max(read)))
    panels[0].set_yticks(places, [textwrap.fill(title, 20) for title in shown])
    panels[0].invert_yaxis()
    for axes in panels:
        axes.title.set_fontsize(11)
        axes.tick_params(labelsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Llama-3.1-8B, RTX 4090, 2 x 2,048 tokens per update.\nBlue: planned. Grey: published by torchtune, measured.",
        fontsize=12,
    )
    return figure


def _label(axes: Any, text: str, end: tuple[float, float], *, is_inside: bool) -> None:
    """Write a figure at the end of a bar."""
    look = {"color": "white", "ha": "right"} if is_inside else {}
    offset = (-4 if is_inside else 3, 0)
    axes.annotate(text, end, xytext=offset, textcoords="offset points", va="center", fontsize=11, **look)


def draw_evidence(shown: dict[str, dict[str, Any]]) -> Any:
    """Draw a panel per task, one above the other: mean and range of each row, the best on top.

    Args:
        shown: By task: `title`, `figure`, and `rows`, the figure per seed by the row's name, the best row last.
    """
    from matplotlib.lines import Line2D

    heights = [len(panel["rows"]) for panel in shown.values()]
    figure = make_figure(PAGE_WIDTH, 0.6 + 0.75 * len(shown) + 0.22 * sum(heights))
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(panels, shown.values(), strict=True):
        scale, label = _AXES[panel["figure"]]
        axes.axvline(scale * statistics.fmean(panel["rows"]["dense"]), color=_METHODS["dense"], linewidth=1)
        for place, (name, values) in enumerate(panel["rows"].items()):
            colour = _METHODS[name.replace(",", " ").split()[0]]
            axes.plot([scale * min(values), scale * max(values)], [place] * 2, color=colour, linewidth=2.5)
            axes.plot(scale * statistics.fmean(values), place, "o", color=colour, markersize=6)
        axes.set_ylim(-0.6, len(panel["rows"]) - 0.4)
        axes.set_yticks(range(len(panel["rows"])), list(panel["rows"]))
        axes.tick_params(labelsize=9)
        axes.set_xlabel(label, fontsize=9)
        axes.set_title(panel["title"], fontsize=10, loc="left")
        style_axes(axes, "x")
    handles = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in _METHODS.items()]
    counts = [len(values) for panel in shown.values() for values in panel["rows"].values()]
    seeds = f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        title=f"Dot: mean of {seeds} seeds. Bar: their range. Grey line: dense. The best row is on top.",
        title_fontsize=9,
    )
    return figure


def draw_ways(shown: dict[str, Any]) -> Any:
    """Draw a bar of memory and a bar of speed per way, as `slivertune plan --compare --plot` does.

    Args:
        shown: `title`, `limit_bytes`, and `bars`: by title the fields of a `Bar`.
    """
    return bars_figure(
        [Bar(title=title, **bar) for title, bar in shown["bars"].items()],
        limit_bytes=shown["limit_bytes"],
        title=shown["title"],
    )
