"""The picture of README's measured figures, from the files under `results/`.

    python benchmarks/measured_plot.py                       # docs/images/measured.png
    python benchmarks/measured_plot.py --output trial.png
    python benchmarks/measured_plot.py --figures             # what is drawn, as JSON

The picture carries these figures in its metadata.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from measured import picture
from result_files import RESULTS, write_picture

PICTURE = RESULTS.parents[1] / "docs" / "images" / "measured.png"
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"


def draw(shown: dict[str, Any]) -> Any:
    """Three panels: the time of a step, loss against memory, bytes that a rank sends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
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
    dial.title.set_fontsize(9)
    dial.margins(x=0.35, y=0.15)

    places = range(len(shown["sent"]))
    for offset, name, title, colour in ((-0.2, "hift", "HiFT", BLUE), (0.2, "sft_ag", "SFT (AG)", ORANGE)):
        values = [each[name] for each in shown["sent"].values()]
        bars = sent.bar([place + offset for place in places], values, 0.4, label=title, color=colour)
        sent.bar_label(bars, fmt="%.2f", fontsize=8)
    sent.axhline(1, color="black", linestyle="--", linewidth=1)
    sent.set_xticks(list(places), list(shown["sent"]), fontsize=8)
    sent.set(title="bytes a rank sends in a step, dense = 1", ylim=(0, 1.15))
    sent.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.86))
    for axes in (step, dial, sent):
        axes.title.set_fontsize(9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=PICTURE, help="file to write (default: docs/images/measured.png)"
    )
    parser.add_argument("--figures", action="store_true", help="print what is drawn, and draw nothing")
    arguments = parser.parse_args()
    shown = picture()
    if arguments.figures:
        print(json.dumps(shown, indent=1))
        return
    write_picture(arguments.output, draw(shown), shown)


if __name__ == "__main__":
    main()
