"""The tables of docs/evidence.md, and what its picture shows, from the files under `results/`.

Whether a claim held, `claims.py` decides.

At equal time for the user: an update of the small model counts as one of an 8B on a 4090 that trains the same share of
its layers, rounded up, as planned. So a setting may have as many updates as take the time of dense's.
"""

import re
from collections.abc import Sequence
from typing import Any

from claims import CLAIMS, IDEAS, Claim
from markdown_table import markdown_table
from measured_row import MeasuredRow, read_row
from quality import ROWS, times_as_many_updates
from result_files import kept

CARDS = ("4090", "3090", "H100")
TASKS = {"language": "language reference: loss", "sst2": "SST-2: accuracy", "retrieval": "docstrings: accuracy"}
Results = dict[str, dict[str, MeasuredRow]]
"""By task and row."""


def read_results() -> Results:
    """What `quality.py` has measured, of the tasks whose dense row, which the others are held against, is there."""
    content = kept("quality")
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
        times = times_as_many_updates(name)
        rows.append([f"`{name}`", f"`{ROWS[name]}`{f', {times:g} times the updates' if times > 1 else ''}"])
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
    ways: dict[str, str] = {}
    for setting, title in _TIMED.values():
        ways.setdefault(setting, title)
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
            measured = [_at_equal_time(of_task, name, allowed) for of_task in results.values()]
            if not any(measured):
                continue
            need, least = points[setting, tokens]["need_bytes"], points["m1", tokens]["need_bytes"]
            memory = f"{need / 2**30:.1f} GiB, {need / least:.2f} of m = 1's"
            rows.append([f"{tokens:,}", title, memory, f"{allowed:.1f}", *measured])
    dense = (f"`dense`: {of_task['dense']}" for of_task in results.values())
    rows.append(["any", "all: dense", "", "1", *dense])
    return markdown_table([*heads, *(TASKS[task] for task in results)], rows)


def _points(card: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the planned points that fit, by setting and tokens an update."""
    points = kept("curve")["points"]
    return {(each["setting"], each["tokens"]): each for each in points if each["card"] == card and each["fits"]}


def _allowed(points: dict[tuple[str, int], dict[str, Any]], setting: str, tokens: int) -> float | None:
    """Updates in the time of one of all layers; None where the setting was not planned or does not fit."""
    if (setting, tokens) not in points:
        return None
    return points[_WHOLE, tokens]["seconds_per_update"] / points[setting, tokens]["seconds_per_update"]


def _at_equal_time(of_task: dict[str, MeasuredRow], first: str, allowed: float) -> str:
    """The row of the most updates that fit, what it came to, and that against dense."""
    names = [name for name in of_task if re.fullmatch(rf"{first}(-x[\d.]+)?", name)]
    fitting = [name for name in names if times_as_many_updates(name) <= allowed]
    if not fitting:
        return ""
    name = max(fitting, key=times_as_many_updates)
    one, dense = of_task[name], of_task["dense"]
    difference = (
        f"{one.mean / dense.mean - 1:+.1%}" if one.figure == "loss" else f"{100 * (one.mean - dense.mean):+.1f} points"
    )
    return f"`{name}`: {one}, **{difference}**"


_WHOLE = "all"
"""The planned setting that trains all layers."""
_TIMED_TOKENS = (512, 4096, 32768)
_TIMED = {
    "hift-1": ("m5", "5 layers of 34 (m = 1 of 8)"),
    "hift-2": ("m9", "9 layers of 34 (m = 2 of 8)"),
    "hift-2-stays": ("m9-stays", "9 layers of 34 (m = 2 of 8), 20 updates a turn"),
    "hift-4": ("m17", "17 layers of 34 (m = 4 of 8)"),
    "hift-4-stays": ("m17-stays", "17 layers of 34 (m = 4 of 8), 20 updates a turn"),
    "tokens-chunks": ("all-tokens", "all layers on 30 % of the tokens"),
    "lora-64": ("lora", "LoRA, r 64"),
    "lora-16": ("lora", "LoRA, r 16, in the time and bytes of r 64"),
    "sft-ag": ("sft", "SFT (AG), as many weights as LoRA r 64"),
    "sft-fixed": ("sft", "SFT, fixed indices, as many weights"),
}
"""By a row's name without its number of updates: the planned setting whose time counts, and its title. Of m of
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
