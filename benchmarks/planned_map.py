"""The planned times of docs/evidence.md: how many updates of each way fit the time of one of all layers.

An update of the small model counts as one of an 8B that trains the same share of its layers, rounded up. So a row may
have as many updates as take the time of dense's. `equal_time` in `evidence.yaml` names the way that counts for a row.

Points are answers of `slivertune plan --gpu CARD --json`, each with the settings that make it again.
"""

import json
import re
import subprocess
import sys
from typing import Any

from environment import record_environment
from evidence_rows import MeasuredRow, times_as_many_updates
from evidence_tables import ASKED, TITLES, read_results
from markdown_table import markdown_table
from result_files import GIB, RESULTS, kept, write_json

RESULT = "planned_map"
"""The result that has the points."""
CARDS = ("4090", "3090", "H100")
TOKENS = (512, 4096, 32768)
"""Per update."""
WHOLE, SMALLEST = "all", "m1"
"""The ways that train all layers, and one layer, per update."""
Points = dict[tuple[str, int], dict[str, Any]]
"""By way and tokens per update."""


def plan_points() -> None:
    """Plan the map's points anew by `slivertune plan --json`, each with the settings it has; written after each."""
    known = kept(RESULT)
    points: list[dict[str, Any]] = known["points"]
    for index, point in enumerate(points):
        options = [f"--{name}={value}" for name, value in point["settings"].items()]
        words = ["plan", "--model", known["model"], "--gpu", point["card"], "--json", *options]
        done = subprocess.run([sys.executable, "-m", "slivertune", *words], check=True, stdout=subprocess.PIPE)
        answer = json.loads(done.stdout)
        about = {name: point[name] for name in ("card", "setting", "tokens", "settings")}
        answered = {name: answer[name] for name in ("need_bytes", "time") if name in answer}
        points[index] = {**about, "fits": "time" in answer, **answered}
        content = {"environment": record_environment(), "model": known["model"], "points": points}
        write_json(RESULTS / f"{RESULT}.json", content)
        print(f"{index + 1} of {len(points)}: {point['card']} {point['setting']} {point['tokens']}", flush=True)


def map_table() -> str:
    """Show the updates of each way in the time of one of all layers, by card and tokens per update."""
    titles: dict[str, str] = {}
    for each in ASKED["equal_time"].values():
        titles.setdefault(each["way"], each["title"])
    rows = []
    for card in CARDS:
        points = _points(card)
        for tokens in (each for each in TOKENS if (WHOLE, each) in points):
            allowed = [_allowed(points, way, tokens) for way in titles]
            one = f"1 ({_seconds(points[WHOLE, tokens]):.2f} s)"
            rows.append([card, f"{tokens:,}", one, *("" if each is None else f"{each:.1f}" for each in allowed)])
    return markdown_table(["Card", "Tokens per update", "all: dense", *titles.values()], rows)


def time_table() -> str:
    """Show what each way comes to in the time that dense fine-tuning takes on a 4090, by tokens per update."""
    points, results, rows = _points("4090"), read_results(), []
    for tokens in TOKENS:
        for name, each in ASKED["equal_time"].items():
            allowed = _allowed(points, each["way"], tokens)
            if allowed is None:
                continue
            measured = [_at_equal_time(of_task, name, allowed) for of_task in results.values()]
            if any(measured):
                need, least = (points[way, tokens]["need_bytes"] for way in (each["way"], SMALLEST))
                memory = f"{need / GIB:.1f} GiB, {need / least:.2f} of m = 1's"
                rows.append([f"{tokens:,}", each["title"], memory, f"{allowed:.1f}", *measured])
    rows.append(["any", "all: dense", "", "1", *(f"`dense`: {of_task['dense']}" for of_task in results.values())])
    heads = ["Tokens per update", "Trained", "GPU needs", "updates for one of all layers"]
    return markdown_table([*heads, *(TITLES[task] for task in results)], rows)


def _points(card: str) -> Points:
    """Return those of a card that fit."""
    points = kept(RESULT)["points"]
    return {(each["setting"], each["tokens"]): each for each in points if each["card"] == card and each["fits"]}


def _seconds(point: dict[str, Any]) -> float:
    return float(point["time"]["seconds_per_update"])


def _allowed(points: Points, way: str, tokens: int) -> float | None:
    """Return the updates in the time of one of all layers; None where the way was not planned or does not fit."""
    return _seconds(points[WHOLE, tokens]) / _seconds(points[way, tokens]) if (way, tokens) in points else None


def _at_equal_time(of_task: dict[str, MeasuredRow], first: str, allowed: float) -> str:
    """Return the row of the most updates that fit, what it came to, and that against dense."""
    names = [name for name in of_task if re.fullmatch(rf"{first}(-x[\d.]+)?", name)]
    fitting = [name for name in names if times_as_many_updates(name) <= allowed]
    if not fitting:
        return ""
    name = max(fitting, key=times_as_many_updates)
    one, dense = of_task[name], of_task["dense"]
    beyond = (
        f"{one.mean / dense.mean - 1:+.1%}" if one.figure == "loss" else f"{100 * (one.mean - dense.mean):+.1f} points"
    )
    return f"`{name}`: {one}, **{beyond}**"
