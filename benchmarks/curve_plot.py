"""The picture of `curve.py`'s points of a card: the dial in blue, what a user would take instead in grey.

    python benchmarks/curve_plot.py                                       # docs/images/curve_8b_4090.png
    python benchmarks/curve_plot.py --card H100 --output trial.png

Left are tokens a second, right tokens a second on which each weight that trains is trained: of k groups one is, on an
update's tokens. Published speeds are points, of their own settings and models.
"""

import argparse
import json
from itertools import cycle
from pathlib import Path
from typing import Any

from curve import CARDS, SETTINGS, TITLES, TOKENS
from result_files import RESULTS, read_json, write_picture

PICTURE = RESULTS.parents[1] / "docs" / "images" / "curve_8b_4090.png"
DRAWN = ("m1", "m2", "m4", "m8", "m17", "all")
"""Of the dial."""
_GREY, _PUBLISHED = "#777777", "#D55E00"
_DASHES = {"lora": "-", "qlora": "--", "sft": "-.", "zero3": ":", "fsdp2": (0, (5, 1, 1, 1, 1, 1))}
_MARKERS = "sD^v"


def figures(result: dict[str, Any], card: str) -> dict[str, Any]:
    """What is drawn: of each setting the tokens an update, and both speeds; and what is published."""
    lines: dict[str, list[list[float]]] = {}
    for point in result["points"]:
        if point["card"] == card and point["fits"] and point["setting"] in (*DRAWN, *_DASHES):
            speeds = [point[name] for name in ("tokens", "tokens_per_second", "weight_tokens_per_second")]
            lines.setdefault(point["setting"], []).append(speeds)
    return {
        "card": card,
        "model": result["model"],
        "efficiency": result["efficiency"],
        "lines": {setting: lines[setting] for setting in SETTINGS if setting in lines},
        "published": [row for row in result["published"] if row["card"] == card],
    }


def draw(shown: dict[str, Any]) -> Any:
    """Two panels, on logarithmic axes."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharex=True)
    blues = {setting: colormaps["Blues"](0.35 + 0.6 * place / (len(DRAWN) - 1)) for place, setting in enumerate(DRAWN)}
    for panel, column in zip(panels, (1, 2), strict=True):
        for setting, points in shown["lines"].items():
            style = (
                {"color": blues[setting], "linewidth": 2, "marker": "o", "markersize": 4}
                if setting in blues
                else {"color": _GREY, "linewidth": 1.4, "linestyle": _DASHES[setting], "marker": ".", "markersize": 5}
            )
            xs, ys = [each[0] for each in points], [each[column] for each in points]
            panel.plot(xs, ys, label=TITLES[setting], **style)
        by_source: dict[str, list[dict[str, Any]]] = {}
        for row in shown["published"]:
            by_source.setdefault(row["source"], []).append(row)
        for marker, (source, rows) in zip(cycle(_MARKERS), by_source.items(), strict=False):
            xs, ys = [row["tokens"] for row in rows], [row["tokens_per_second"] for row in rows]
            panel.scatter(xs, ys, marker=marker, s=36, color=_PUBLISHED, zorder=3, label=f"published: {source}")
        for row in shown["published"]:
            place = (row["tokens"], row["tokens_per_second"])
            panel.annotate(row["method"], place, xytext=(6, 3), textcoords="offset points", fontsize=7)
        panel.set(xscale="log", yscale="log", xlabel="tokens an update")
        counts = sorted({*TOKENS, *(row["tokens"] for row in shown["published"])})
        panel.set_xticks(counts, [f"{each:,}" for each in counts], fontsize=8, rotation=30)
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_title("tokens a second", fontsize=10)
    panels[1].set_title("tokens a second on which each weight that trains is trained", fontsize=10)
    for panel in panels:
        low, high = panel.get_ylim()
        ticks = [mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        panel.set_yticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    figure.suptitle(
        f"{shown['model']} on a {shown['card']}, planned at {shown['efficiency']:.0%} of its peak", fontsize=11
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=RESULTS / "curve.json")
    parser.add_argument("--card", choices=CARDS, default="4090")
    parser.add_argument("--output", type=Path, help="file to write (default: docs/images/curve_8b_4090.png)")
    parser.add_argument("--figures", action="store_true", help="print what is drawn, and draw nothing")
    arguments = parser.parse_args()
    if arguments.output is None and (arguments.card != "4090" or arguments.input != RESULTS / "curve.json"):
        parser.error("another --card or --input needs --output FILE")
    shown = figures(read_json(arguments.input), arguments.card)
    if arguments.figures:
        print(json.dumps(shown, indent=1))
        return
    write_picture(arguments.output or PICTURE, draw(shown), shown)


if __name__ == "__main__":
    main()
