"""The tables of docs/evidence.md and what its picture shows, from `results/quality.json` and `evidence.yaml`."""

from collections.abc import Iterable, Sequence
from typing import Any

from evidence_rows import MeasuredRow, read_row, read_rows_file, times_as_many_updates, verdict
from markdown_table import markdown_table, titled
from result_files import kept

ASKED = read_rows_file()
TITLES: dict[str, str] = {task: each["title"] for task, each in ASKED["tasks"].items()}
Results = dict[str, dict[str, MeasuredRow]]
"""By task and row."""


def read_results() -> Results:
    """Return what was measured of the tasks whose dense row is there; the others are held against it."""
    content = kept("quality")
    results = {
        task: {row["name"]: read_row(row) for row in content.get(task, []) if not row["failure"]} for task in TITLES
    }
    return {task: of_task for task, of_task in results.items() if "dense" in of_task}


def quality_table() -> str:
    """Show what each row came to at its best rate, a table per task."""
    return titled(
        {
            TITLES[task]: markdown_table(
                ["Row", of_task["dense"].figure.capitalize(), "Rate", "MB"],
                ([f"`{name}`", *row.cells] for name, row in of_task.items()),
            )
            for task, of_task in read_results().items()
        }
    )


def rows_table() -> str:
    """Show the options of each row."""
    results, rows = read_results(), {}
    for task in results:
        for row in kept("quality")[task]:
            times = times_as_many_updates(row["name"])
            if row["name"] in results[task]:
                rows[row["name"]] = f"`{row['options']}`" + (f", {times:g} times the updates" if times > 1 else "")
    return markdown_table(["Row", "Options of `slivertune train`"], ([f"`{name}`", of] for name, of in rows.items()))


def claims_table() -> str:
    """Show whether each claim held, task by task."""
    claims = (((f"{each['text']} ({each['source']})",), each["relation"], each["rows"]) for each in ASKED["claims"])
    return _verdicts(("Claim (source)",), claims)


def ideas_table() -> str:
    """Show whether each idea was better than what it changes, task by task."""
    pairs = ((each["text"], *pair) for each in ASKED["ideas"] for pair in each["pairs"])
    ideas = (((text, f"`{one}`", f"`{other}`"), "better", (one, other)) for text, one, other in pairs)
    return _verdicts(("Idea", "Row", "Better than"), ideas)


def _verdicts(heads: Sequence[str], claims: Iterable[tuple[Sequence[str], str, Sequence[str]]]) -> str:
    """Make a table of the claims that a task decides, with a column for each such task."""
    results, rows = read_results(), []
    for cells, relation, names in claims:
        verdicts = {task: verdict(relation, names, of_task) for task, of_task in results.items()}
        if any(verdicts.values()):
            rows.append((cells, verdicts))
    tasks = [task for task in results if any(verdicts[task] for _, verdicts in rows)]
    shown = ([*cells, *(verdicts[task] for task in tasks)] for cells, verdicts in rows)
    return markdown_table([*heads, *(TITLES[task] for task in tasks)], shown)


def figures() -> dict[str, dict[str, Any]]:
    """Return the panels of the picture.

    Returns:
        By task: `title`, `figure` (loss or accuracy), and `rows`, the figure per seed by the row's name, best row last.
    """
    shown = {}
    for task, of_task in read_results().items():
        picture, figure = ASKED["tasks"][task]["picture"], of_task["dense"].figure
        rows = {name: of_task[row] for row, name in picture["rows"].items()}
        ranked = sorted(rows.items(), key=lambda item: item[1].mean, reverse=figure == "loss")
        values = {name: list(row.values) for name, row in ranked}
        shown[task] = {"title": picture["title"], "figure": figure, "rows": values}
    return shown
