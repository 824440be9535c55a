"""The planned times of docs/evidence.md and README's picture.

How many updates of each way fit the time of one of all layers?

An update of the small model counts as one of an 8B that trains the same share of its layers, rounded up. So a row may
have as many updates as take the time of dense's. `equal_time` in `evidence.yaml` names the way that counts for a row.

Points are answers of `slivertune plan --gpu CARD --json`, each with the settings that make it again.
"""

import json
import math
import re
import subprocess
import sys
from typing import Any

from environment import record_environment
from evidence_rows import MeasuredRow, times_as_many_updates
from evidence_tables import ASKED, TITLES, read_results
from markdown_table import markdown_table, titled
from result_files import GIB, RESULTS, kept, write_json

RESULT = "planned_map"
"""The result that has the points."""
CARDS = ("4090", "3090", "H100")
TOKENS = (512, 4096, 32768)
"""Per update."""
WHOLE, SMALLEST = "all", "m1"
"""The ways that train all layers, and one layer, per update."""
_DENSE = "All layers (dense)"
"""The way that the others are held against, as tables call it."""
NUM_LAYERS = 34
"""Of Llama-3.1-8B, as HiFT counts them: an embedding, 32 blocks, a head."""
_SHOWN = {
    "m1": "HiFT, 1 of 34 layers per group",
    "m9-stays": "HiFT, 9 of 34 layers per group",
    "all": "HiFT, all layers in one group",
    "full": "full, all weights in each update",
    "sft": "SFT (AG), weights of LoRA rank 64",
    "lora": "LoRA, rank 64",
}
"""The ways of README's picture."""
_PUBLISHED = {
    "8B, LoRA r 8, 2 x 2,048, compiled": "torchtune: LoRA, rank 8",
    "8B, full, paged 8-bit AdamW, stepped in the backward, compiled": "torchtune: all weights, 8-bit state",
}
"""The rows of `plan_speeds.yaml` beside them."""
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
        answered = {name: answer[name] for name in ("need_bytes", "host_bytes", "time") if name in answer}
        points[index] = {**about, "fits": "time" in answer, **answered}
        content = {"environment": record_environment(), "model": known["model"], "points": points}
        write_json(RESULTS / f"{RESULT}.json", content)
        print(f"{index + 1} of {len(points)}: {point['card']} {point['setting']} {point['tokens']}", flush=True)


def map_table() -> str:
    """Show the updates of each way in the time of one of all layers, by card, way and tokens per update."""
    titles: dict[str, str] = {}
    for each in ASKED["equal_time"].values():
        titles.setdefault(each["way"], each["title"])
    rows = []
    for card in CARDS:
        points = _points(card)
        dense = [points.get((WHOLE, tokens)) for tokens in TOKENS]
        cells = {_DENSE: ["" if each is None else f"1 ({_seconds(each):.2f} s)" for each in dense]}
        for way, title in titles.items():
            allowed = [_allowed(points, way, tokens) for tokens in TOKENS]
            cells[title] = ["" if each is None else f"{each:.1f}" for each in allowed]
        rows += [[card, title, *of_way] for title, of_way in cells.items() if any(of_way)]
    return markdown_table(["Card", "Trained", *(f"{tokens:,} tokens per update" for tokens in TOKENS)], rows)


def time_table() -> str:
    """Show what each way comes to in the time that dense fine-tuning takes on a 4090.

    Returns:
        A table of planned memory and updates, and one of figures for each task, by tokens per update and way.
    """
    points, results, planned = _points("4090"), read_results(), []
    measured: dict[str, list[list[str]]] = {task: [] for task in results}
    for tokens in TOKENS:
        for name, each in ASKED["equal_time"].items():
            allowed = _allowed(points, each["way"], tokens)
            if allowed is None:
                continue
            begin = [f"{tokens:,}", each["title"]]
            found = {task: _at_equal_time(of_task, name, allowed) for task, of_task in results.items()}
            for task, cells in found.items():
                measured[task] += [[*begin, *cells]] if cells else []
            if any(found.values()):
                need, least = (points[way, tokens]["need_bytes"] for way in (each["way"], SMALLEST))
                planned.append([*begin, f"{need / GIB:.1f} GiB ({need / least:.2f})", f"{allowed:.1f}"])
    heads = ["Tokens per update", "Trained"]
    of_plan = [*heads, f"GPU memory (over that of 1 of {NUM_LAYERS} layers)", "Updates per update of all layers"]
    tables = {"Planned memory and updates": markdown_table(of_plan, planned)}
    for task, rows in measured.items():
        dense = results[task]["dense"]
        rows.append(["any", _DENSE, "`dense`", str(dense), ""])
        tables[TITLES[task]] = markdown_table([*heads, "Row", dense.figure.capitalize(), "Against dense"], rows)
    return titled(tables)


def fixed_batch() -> dict[str, dict[str, Any]]:
    """Return the bars of README's picture: ways to train an 8B on a 4090 with 2 x 2,048 tokens per update.

    Returns:
        By title: bytes on the GPU and on the host (None if its authors do not say), tokens/s that are read, tokens/s
        that each trained weight learns from, and whether others published the row.
    """
    points, bars = _points("4090"), {}
    for way, title in _SHOWN.items():
        point = points[way, 4096]
        settings, read = point["settings"], point["time"]["tokens_per_second"]
        is_hift = settings.get("method", "hift") == "hift"
        num_groups = math.ceil(NUM_LAYERS / settings["layers_per_group"]) if is_hift else 1
        bars[title] = _bar(point["need_bytes"], point["host_bytes"], read, read / num_groups, is_published=False)
    (torchtune,) = (group for group in kept("plan_speeds")["groups"] if group["name"] == "torchtune")
    for row in torchtune["rows"]:
        read = row["published_tokens_per_second"]
        bars[_PUBLISHED[row["name"]]] = _bar(row["published_gib"] * GIB, None, read, read, is_published=True)
    return bars


def _bar(
    gpu_bytes: float, host_bytes: int | None, read: float, learned: float, *, is_published: bool
) -> dict[str, Any]:
    return {
        "gpu_bytes": gpu_bytes,
        "host_bytes": host_bytes,
        "tokens_per_second": read,
        "weight_tokens_per_second": learned,
        "is_published": is_published,
    }


def _points(card: str) -> Points:
    """Return those of a card that fit."""
    points = kept(RESULT)["points"]
    return {(each["setting"], each["tokens"]): each for each in points if each["card"] == card and each["fits"]}


def _seconds(point: dict[str, Any]) -> float:
    return float(point["time"]["seconds_per_update"])


def _allowed(points: Points, way: str, tokens: int) -> float | None:
    """Return the updates in the time of one of all layers; None if one of both was not planned or does not fit."""
    one, other = points.get((WHOLE, tokens)), points.get((way, tokens))
    return None if one is None or other is None else _seconds(one) / _seconds(other)


def _at_equal_time(of_task: dict[str, MeasuredRow], first: str, allowed: float) -> list[str]:
    """Return the best row whose updates fit, its figure, and that against dense; nothing if no row fits."""
    names = [name for name in of_task if re.fullmatch(rf"{first}(-x[\d.]+)?", name)]
    fitting = [name for name in names if times_as_many_updates(name) <= allowed]
    if not fitting:
        return []
    name = fitting[0]
    for other in fitting[1:]:
        name = other if of_task[other].is_better(of_task[name]) else name
    one, dense = of_task[name], of_task["dense"]
    beyond = (
        f"{one.mean / dense.mean - 1:+.1%}" if one.figure == "loss" else f"{100 * (one.mean - dense.mean):+.1f} points"
    )
    return [f"`{name}`", str(one), f"**{beyond}**"]
