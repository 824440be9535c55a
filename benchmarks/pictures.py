"""The pictures of README and of docs/evidence.md; each carries its figures in its metadata."""

import statistics
from typing import Any

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
_COLOURS = {
    "dense": "#000000",
    "hift": "#0072B2",
    "sft": "#D55E00",
    "qsft": "#D55E00",
    "lora": "#009E73",
    "qlora": "#009E73",
    "tokens": "#CC79A7",
    "lisa": "#999999",
    "galore": "#999999",
}
"""By the first word of a row's name."""


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_fixed_batch(shown: dict[str, dict[str, Any]]) -> Any:
    """Draw three panels of one bar per way: memory of the GPU, memory of the host, tokens/s.

    Args:
        shown: By title: `gpu_bytes`, `host_bytes` (None if unknown), `tokens_per_second`, `weight_tokens_per_second`,
            `is_published`.
    """
    figure = _figure(11, 3.6)
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.2))
    places = range(len(shown))
    colours = [GREY if each["is_published"] else BLUE for each in shown.values()]
    for axes, name, title in (
        (panels[0], "gpu_bytes", "GPU memory"),
        (panels[1], "host_bytes", "Offloaded to the host"),
    ):
        sizes = [(each[name] or 0) / 2**30 for each in shown.values()]
        axes.barh(places, sizes, color=colours)
        for place, (size, each) in enumerate(zip(sizes, shown.values(), strict=True)):
            text = "not published" if each[name] is None else f"{size:.1f}" if size else "0"
            _label(axes, text, (size, place), is_inside=size > 0)
        axes.set(title=f"{title}, GiB", xlim=(0, 1.15 * max(sizes)))
    panels[0].axvline(24, color=ORANGE, linestyle="--", linewidth=1)
    panels[0].annotate("24 GiB", (24, len(shown) - 0.6), xytext=(3, 0), textcoords="offset points", fontsize=8)
    speeds = panels[2]
    read = [each["tokens_per_second"] for each in shown.values()]
    learned = [each["weight_tokens_per_second"] for each in shown.values()]
    speeds.barh(places, read, color=colours, alpha=0.3)
    speeds.barh(places, learned, 0.45, color=colours)
    for place, (one, all_read) in enumerate(zip(learned, read, strict=True)):
        text = f"{one:,.0f}" if one == all_read else f"{one:,.0f} of {all_read:,.0f}"
        _label(speeds, text, (all_read, place), is_inside=False)
    speeds.set(title="Tokens/s per trained weight (dark), read (light)", xlim=(0, 1.25 * max(read)))
    panels[0].set_yticks(places, list(shown), fontsize=9)
    panels[0].invert_yaxis()
    for axes in panels:
        axes.title.set_fontsize(9)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Llama-3.1-8B, RTX 4090, 2 x 2,048 tokens per update. Blue: planned. Grey: published by torchtune, measured.",
        fontsize=10,
    )
    return figure


def _label(axes: Any, text: str, end: tuple[float, float], *, is_inside: bool) -> None:
    """Write a figure at the end of a bar."""
    look = {"color": "white", "ha": "right"} if is_inside else {}
    offset = (-4 if is_inside else 3, 0)
    axes.annotate(text, end, xytext=offset, textcoords="offset points", va="center", fontsize=8, **look)


def draw_evidence(shown: dict[str, dict[str, list[float]]], titles: dict[str, str]) -> Any:
    """Draw a panel per task: every row's mean and range, the best on top.

    Args:
        shown: By task and row, a figure per seed; the best row last.
        titles: Of the tasks; that of an accuracy ends with that word.
    """
    tallest = max(len(of_task) for of_task in shown.values())
    figure = _figure(5 * len(shown), 0.9 + 0.24 * tallest)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (task, of_task) in zip(panels, shown.items(), strict=True):
        scale, unit = (100, ", %") if titles[task].endswith("accuracy") else (1, "")
        for place, (name, values) in enumerate(of_task.items()):
            colour = _COLOURS[name.partition("-")[0]]
            axes.plot([scale * value for value in values], [place] * len(values), color=colour)
            axes.plot(scale * statistics.fmean(values), place, "o", color=colour, markersize=5)
        axes.axvline(scale * statistics.fmean(of_task["dense"]), color="#999999", linewidth=0.8)
        axes.set_ylim(len(of_task) - tallest - 0.5, len(of_task) - 0.5)
        axes.set_yticks(range(len(of_task)), list(of_task), fontsize=8)
        axes.set_title(titles[task] + unit, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
