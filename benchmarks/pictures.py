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


def draw_measured(shown: dict[str, Any]) -> Any:
    """Draw three panels: the time of a step, loss against memory, bytes that a rank sends."""
    figure = _figure(11, 3.4)
    step, dial, sent = figure.subplots(1, 3)
    bars = step.barh(list(shown["step"]), list(shown["step"].values()), color=[GREY, ORANGE, ORANGE, BLUE, BLUE])
    step.bar_label(bars, fmt="%.2f", padding=-30, fontsize=9, color="white")
    step.axvline(1, color="black", linestyle="--", linewidth=1)
    step.set(title="CPU time of a step, dense = 1", xlim=(0, 1.15))

    points = [(each["megabytes"], each["loss"], m) for m, each in shown["dial"].items()]
    dial.plot(*zip(*[point[:2] for point in points], strict=True), "o-", color=BLUE)
    for megabytes, loss, m in points:
        name = f"{m}, all: dense" if m == points[-1][2] else m
        dial.annotate(name, (megabytes, loss), xytext=(5, 5), textcoords="offset points", fontsize=9)
    dial.set(title="HiFT: loss after equal CPU time, by layers_per_group", xlabel="MB on the device at the peak")
    dial.margins(x=0.35, y=0.15)

    places = range(len(shown["sent"]))
    for offset, name, title, colour in ((-0.2, "hift", "HiFT", BLUE), (0.2, "sft_ag", "SFT (AG)", ORANGE)):
        values = [each[name] for each in shown["sent"].values()]
        bars = sent.bar([place + offset for place in places], values, 0.4, label=title, color=colour)
        sent.bar_label(bars, fmt="%.2f", fontsize=8)
    sent.axhline(1, color="black", linestyle="--", linewidth=1)
    sent.set_xticks(list(places), list(shown["sent"]), fontsize=8)
    sent.set(title="bytes sent by each rank per step, dense = 1", ylim=(0, 1.15))
    sent.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.86))
    for axes in (step, dial, sent):
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


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
