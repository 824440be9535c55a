"""The tables and the picture of docs/evidence.md, from the files under `results/`; nothing is trained.

    python benchmarks/tables.py --write       # puts the tables into the page
    python benchmarks/evidence.py             # draws the picture

Whether a claim held is decided by one rule, of figures that each row has at its own best rate, one a seed: two rows
differ if their ranges do not overlap. `as good` holds unless they differ and the first is worse; `better` holds if they
differ and the first is better, does not if they differ and it is worse, and is not decided where ranges overlap.

At equal time for the user: an update of the small model counts as one of an 8B on a 4090 that trains the same share of
its layers, rounded up, as `curve.py` has planned it. So a setting may have as many updates as take the time of dense's.
"""

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from curve import CARDS
from markdown_table import markdown_table
from measured_row import MeasuredRow, read_row
from quality import ROWS, num_updates
from result_files import RESULTS, read_json, write_picture

PICTURE = RESULTS.parents[1] / "docs" / "images" / "evidence.png"
TASKS = {"language": "language reference: loss", "sst2": "SST-2: accuracy", "retrieval": "docstrings: accuracy"}
Relation = Literal["as good", "better", "alike"]
Results = dict[str, dict[str, MeasuredRow]]
"""By task and row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What somebody says of a method, and the rows that show it."""

    text: str
    source: str
    relation: Relation
    rows: tuple[str, ...]
    """`alike` takes any number of rows, the others two."""

    def verdict(self, of_task: dict[str, MeasuredRow]) -> str:
        """`held`, `not held` or `not decided` and the figures; nothing where a row or its seeds are missing."""
        known = [of_task[name] for name in self.rows if name in of_task]
        if len(known) < len(self.rows) or min(len(each.values) for each in known) < 2:
            return ""
        first, second = known[:2]
        differing = [(one, other) for one, other in itertools.combinations(known, 2) if one.differs(other)]
        if self.relation == "alike":
            word = "not held" if differing else "held"
        elif self.relation == "as good":
            word = "not held" if differing and not first.is_better(second) else "held"
        elif differing:
            word = "held" if first.is_better(second) else "not held"
        else:
            word = "not decided"
        return f"**{word}**: {'; '.join(map(str, known))}"


HIFT, SFT, TOKENS, OURS = "HiFT", "SFT", "TokenTune", "this library"
CLAIMS = (
    Claim(
        text="fine-tuning a group at a time is as good as all layers at once, after as many updates",
        source=f"{HIFT}, 4.2",
        relation="as good",
        rows=("hift-1", "dense"),
    ),
    Claim(
        text="the order of groups has almost no effect (bottom up, top down, random)",
        source=f"{HIFT}, 4.5",
        relation="alike",
        rows=("hift-1", "hift-1-top-down", "hift-1-random"),
    ),
    Claim(
        text="the size of groups has a negligible effect (m = 1, 2, 4)",
        source=f"{HIFT}, 4.6",
        relation="alike",
        rows=("hift-1", "hift-2", "hift-4"),
    ),
    Claim(
        text="a rate held for a cycle is better than one that changes within it",
        source=f"{HIFT}, 4.6",
        relation="better",
        rows=("hift-1", "hift-1-not-held"),
    ),
    Claim(
        text="accumulated gradients choose better weights than momentum",
        source=f"{SFT}, 5.1",
        relation="better",
        rows=("sft-ag", "sft-ma"),
    ),
    Claim(
        text="SFT (AG) is at least as good as LoRA of as many weights",
        source=f"{SFT}, 5.1",
        relation="as good",
        rows=("sft-ag", "lora-64"),
    ),
    Claim(
        text="so is it over 4-bit weights, beside QLoRA",
        source=f"{SFT}, 5.1",
        relation="as good",
        rows=("qsft", "qlora-64"),
    ),
    Claim(
        text="weights that are chosen again are better than a fixed random choice",
        source=f"{SFT}, 3",
        relation="better",
        rows=("sft-ag", "sft-fixed"),
    ),
    Claim(
        text="30 % of the tokens, each drawn by itself, are as good as all",
        source=f"{TOKENS}, abstract",
        relation="as good",
        rows=("tokens-random", "dense"),
    ),
    Claim(
        text="30 % of the tokens are as good as all under LoRA",
        source=f"{TOKENS}, abstract",
        relation="as good",
        rows=("lora-64-tokens", "lora-64"),
    ),
    Claim(
        text="chunks of neighbours are better than single tokens",
        source=OURS,
        relation="better",
        rows=("tokens-chunks", "tokens-random"),
    ),
    Claim(
        text="waiting layers in NF4 are as good as exact ones",
        source=OURS,
        relation="as good",
        rows=("hift-1-nf4", "hift-1"),
    ),
    Claim(
        text="state in 8 bits is as good as in 32",
        source="bitsandbytes",
        relation="as good",
        rows=("dense-8bit", "dense"),
    ),
    Claim(
        text="HiFT (m = 1) is as good as BAdam's way, a block for 20 updates",
        source=OURS,
        relation="as good",
        rows=("hift-1", "hift-1-stays"),
    ),
    Claim(
        text="HiFT (m = 2) is as good as LISA, which always trains embedding and head",
        source=OURS,
        relation="as good",
        rows=("hift-2", "lisa"),
    ),
    Claim(
        text="HiFT (m = 4) is as good as GaLore",
        source=OURS,
        relation="as good",
        rows=("hift-4", "galore-64"),
    ),
)


def _idea(text: str, *pairs: tuple[str, str]) -> tuple[Claim, ...]:
    """That the first row of each pair is better than the second, which it changes."""
    return tuple(Claim(text=text, source=OURS, relation="better", rows=pair) for pair in pairs)


IDEAS = (
    *_idea(
        "HiFT with less momentum (beta1 = 0.5), since what it remembers is a cycle old",
        ("hift-1-momentum-0.5", "hift-1"),
        ("hift-2-momentum-0.5", "hift-2"),
        ("hift-4-momentum-0.5", "hift-4"),
        ("hift-2-momentum-0.5-x2", "hift-2-x2"),
    ),
    *_idea("the same of dense fine-tuning, where it is not old", ("dense-momentum-0.5", "dense")),
    *_idea(
        "HiFT stays with a group for 20 updates, so that what its momentum remembers is fresh",
        ("hift-1-stays", "hift-1"),
        ("hift-2-stays", "hift-2"),
        ("hift-2-stays-x2", "hift-2-x2"),
    ),
    *_idea("SFT chooses once, by the gradients of the first updates, and keeps the choice", ("sft-ag-once", "sft-ag")),
    *_idea("SFT chooses again every 60 updates, not every 20", ("sft-ag-60", "sft-ag")),
)
"""What was tried to improve a method."""


def read_results() -> Results:
    """What `quality.py` has measured, of the tasks whose dense row, which the others are held against, is there."""
    content = read_json(RESULTS / "quality.json")
    results = {
        task: {row["name"]: read_row(row) for row in content.get(task, []) if not row["failure"]} for task in TASKS
    }
    return {task: of_task for task, of_task in results.items() if "dense" in of_task}


def quality_table() -> str:
    """Each row's figure at its best rate, task by task."""
    results = read_results()
    heads = ["Row", *(head for task in results for head in (TASKS[task], "rate", "MB"))]
    return markdown_table(heads, ([f"`{name}`", *_cells(results, name)] for name in _known(results)))


def _known(results: Results) -> list[str]:
    """The rows that any task has."""
    return [name for name in ROWS if any(name in of_task for of_task in results.values())]


def _cells(results: Results, name: str) -> list[str]:
    return [cell for of_task in results.values() for cell in (of_task[name].cells if name in of_task else [""] * 3)]


def rows_table() -> str:
    """What the rows are, as options of `slivertune train`."""
    rows = []
    for name in _known(read_results()):
        times = num_updates(name, 1)
        rows.append([f"`{name}`", f"`{ROWS[name]}`{f', {times} times the updates' if times > 1 else ''}"])
    return markdown_table(["Row", "Options of `slivertune train`"], rows)


def claims_table() -> str:
    """Each claim's verdict, task by task."""
    return _verdicts(("Claim", "By"), [((each.text, each.source), each) for each in CLAIMS])


def ideas_table() -> str:
    """Whether each idea was better than what it changes, task by task."""
    cells = ((each.text, f"`{each.rows[0]}`", f"`{each.rows[1]}`") for each in IDEAS)
    return _verdicts(("Idea", "Row", "Better than"), list(zip(cells, IDEAS, strict=True)))


def _verdicts(heads: Sequence[str], claims: Sequence[tuple[Sequence[str], Claim]]) -> str:
    results = read_results()
    rows = []
    for cells, claim in claims:
        verdicts = [claim.verdict(of_task) for of_task in results.values()]
        if any(verdicts):
            rows.append([*cells, *verdicts])
    return markdown_table([*heads, *(TASKS[task] for task in results)], rows)


def map_table() -> str:
    """How many updates of each way of training fit the time of one of all layers, on each card."""
    # SFT's fixed indices are planned as those of AG are.
    ways = {setting: title for name, (setting, title) in _TIMED.items() if name != "sft-fixed"}
    rows = []
    for card in CARDS:
        points = _points(card)
        for tokens in _TIMED_TOKENS:
            if (_WHOLE, tokens) in points:
                seconds = points[_WHOLE, tokens]["seconds_per_update"]
                allowed = (_allowed(points, setting, tokens) for setting in ways)
                updates = ("" if each is None else f"{each:.1f}" for each in allowed)
                rows.append([card, f"{tokens:,}", f"1 ({seconds:.2f} s)", *updates])
    return markdown_table(["Card", "Tokens an update", "all: dense", *ways.values()], rows)


def time_table() -> str:
    """What each way of training comes to in the time that dense fine-tuning takes on a 4090, by tokens an update."""
    points, results = _points("4090"), read_results()
    heads = ["Tokens an update", "Trained", "GPU needs", "updates for one of all layers"]
    rows = []
    for tokens in _TIMED_TOKENS:
        for name, (setting, title) in _TIMED.items():
            allowed = _allowed(points, setting, tokens)
            if allowed is None:
                continue
            need, least = points[setting, tokens]["need_bytes"], points["m1", tokens]["need_bytes"]
            memory = f"{need / 2**30:.1f} GiB, {need / least:.2f} of m = 1's"
            measured = (_at_equal_time(of_task, name, allowed) for of_task in results.values())
            rows.append([f"{tokens:,}", title, memory, f"{allowed:.1f}", *measured])
    dense = (f"`dense`: {of_task['dense']}" for of_task in results.values())
    rows.append(["any", "all: dense", "", "1", *dense])
    return markdown_table([*heads, *(TASKS[task] for task in results)], rows)


def _points(card: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Those of `curve.py` that fit, by setting and tokens an update."""
    points = read_json(RESULTS / "curve.json")["points"]
    return {(each["setting"], each["tokens"]): each for each in points if each["card"] == card and each["fits"]}


def _allowed(points: dict[tuple[str, int], dict[str, Any]], setting: str, tokens: int) -> float | None:
    """Updates in the time of one of all layers; None where the setting was not planned or does not fit."""
    if (setting, tokens) not in points:
        return None
    return points[_WHOLE, tokens]["seconds_per_update"] / points[setting, tokens]["seconds_per_update"]


def _at_equal_time(of_task: dict[str, MeasuredRow], first: str, allowed: float) -> str:
    """The row of the most updates that fit, what it came to, and that against dense."""
    names = [name for name in of_task if re.fullmatch(rf"{first}(-x\d+)?", name)]
    fitting = [name for name in names if num_updates(name, 1) <= allowed]
    if not fitting:
        return ""
    name = max(fitting, key=lambda each: num_updates(each, 1))
    one, dense = of_task[name], of_task["dense"]
    difference = (
        f"{one.mean / dense.mean - 1:+.1%}" if one.figure == "loss" else f"{100 * (one.mean - dense.mean):+.1f} points"
    )
    return f"`{name}`: {one}, **{difference}**"


_WHOLE = "all"
"""The setting of `curve.py` that trains all layers."""
_TIMED_TOKENS = (512, 4096, 32768)
_TIMED = {
    "hift-1": ("m5", "5 layers of 34 (m = 1 of 8)"),
    "hift-2": ("m9", "9 layers of 34 (m = 2 of 8)"),
    "hift-4": ("m17", "17 layers of 34 (m = 4 of 8)"),
    "tokens-chunks": ("all-tokens", "all layers on 30 % of the tokens"),
    "lora-64": ("lora", "LoRA, r 64"),
    "sft-ag": ("sft", "SFT (AG), as many weights as LoRA r 64"),
    "sft-fixed": ("sft", "SFT, fixed indices, as many weights"),
}
"""By a row's name without its number of updates: the setting of `curve.py` whose time counts, and its title. Of m of
eight layers it is the one that trains the same share of 34, rounded up."""


def figures() -> dict[str, dict[str, list[float]]]:
    """What is drawn: of each task each row's seeds, the best row last."""
    return {
        task: {
            name: list(measured.values)
            for name, measured in sorted(of_task.items(), key=lambda item: item[1].mean, reverse=task == "language")
        }
        for task, of_task in read_results().items()
    }


def draw(shown: dict[str, dict[str, list[float]]]) -> Any:
    """A panel a task: every row's mean and range, the best on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tallest = max(len(of_task) for of_task in shown.values())
    figure = Figure(figsize=(5 * len(shown), 0.9 + 0.24 * tallest), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (task, of_task) in zip(panels, shown.items(), strict=True):
        scale = 1 if task == "language" else 100
        for place, (name, values) in enumerate(of_task.items()):
            colour = _COLOURS[name.partition("-")[0]]
            axes.plot([scale * value for value in values], [place] * len(values), color=colour)
            axes.plot(scale * statistics.fmean(values), place, "o", color=colour, markersize=5)
        axes.axvline(scale * statistics.fmean(of_task["dense"]), color="#999999", linewidth=0.8)
        axes.set_ylim(len(of_task) - tallest - 0.5, len(of_task) - 0.5)
        axes.set_yticks(range(len(of_task)), list(of_task), fontsize=8)
        axes.set_title(TASKS[task] + ("" if task == "language" else ", %"), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


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


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE, help="default: docs/images/evidence.png")
    parser.add_argument("--figures", action="store_true", help="print what is drawn, and draw nothing")
    arguments, shown = parser.parse_args(), figures()
    if arguments.figures:
        print(json.dumps(shown, indent=1))
        return
    write_picture(arguments.output, draw(shown), shown)


if __name__ == "__main__":
    main()
