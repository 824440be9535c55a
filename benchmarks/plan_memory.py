"""Planned peaks of GPU memory against those that others have measured.

Nothing is run but plans. The rows lie in plan_memory.yaml.

    OMP_NUM_THREADS=1 python benchmarks/plan_memory.py          # minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/plan_memory.py --groups fitcheck
"""

import argparse
from pathlib import Path
from typing import Any

import yaml
from environment import record_environment
from markdown_table import markdown_table
from result_files import RESULTS, read_json, write_json
from transformers import AutoConfig

from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.request import PlanRequest

EXPLAINED_FROM = 0.1
"""Error from which a row says what is known of it."""
UNITS = {"mib": 2**20, "gib": 2**30, "gb": 1e9}
PUBLISHED: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GROUPS: dict[str, dict[str, Any]] = {group["name"]: group for group in PUBLISHED["groups"]}


def measured_bytes(row: dict[str, Any]) -> float:
    """Return a row's measured peak in bytes."""
    (unit,) = row.keys() & UNITS
    return float(row[unit] * UNITS[unit])


def planned_bytes(row: dict[str, Any]) -> int:
    """Return the planned peak of a row, without allowances."""
    figures = PUBLISHED["models"].get(row["model"])
    config = find_model(row["model"]).config if figures is None else AutoConfig.for_model(**figures)
    settings = {name: tuple(each) if isinstance(each, list) else each for name, each in row["settings"].items()}
    peak = make_plan(PlanRequest(**settings), config).peak
    return peak.total - (peak.state if row.get("is_paged") else 0)


def plan_rows(group: dict[str, Any]) -> dict[str, Any]:
    """Plan the rows of a group."""
    rows = []
    for row in group["rows"]:
        planned, measured = planned_bytes(row), measured_bytes(row)
        rows.append({**row, "planned_bytes": planned, "measured_bytes": measured, "error": planned / measured - 1})
        print(f"{group['name']}: {row['name']}: {planned / measured:.3f} of the measured peak", flush=True)
    return {**group, "rows": rows}


def table(groups: list[dict[str, Any]]) -> str:
    """Format the rows in Markdown, with the sources and the reasons below."""
    lines = [
        [
            group["name"],
            row["name"],
            *(f"{row[f'{kind}_bytes'] / 2**30:.2f}" for kind in ("measured", "planned")),
            f"{100 * row['error']:+.1f} %",
        ]
        for group in groups
        for row in group["rows"]
    ]
    sources = [f"- {group['name']}: [{group['source']}]({group['url']})" for group in groups]
    reasons: dict[str, list[str]] = {}
    for group in groups:
        for row in group["rows"]:
            if abs(row["error"]) > EXPLAINED_FROM:
                reasons.setdefault(f"{group['name']}: {row['explained_by']}", []).append(row["name"])
    beyond = [f"- {reason} ({'; '.join(names)})" for reason, names in reasons.items()]
    rows = markdown_table(["Source", "Run", "measured", "planned", "error"], lines)
    return "\n".join([rows, "", *sources, "", f"Beyond {100 * EXPLAINED_FROM:.0f} %:", "", *beyond])


def main() -> None:
    """Plan, write the result after every group, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), help="a part; all by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "plan_memory.json")
    arguments = parser.parse_args()
    by_name = {group["name"]: group for group in read_json(arguments.output).get("groups", [])}
    for name, group in GROUPS.items():
        if arguments.groups is None or name in arguments.groups:
            by_name[name] = plan_rows(group)
            found = [by_name[each] for each in GROUPS if each in by_name]
            write_json(arguments.output, {"environment": record_environment(), "groups": found})
    print(table([by_name[each] for each in GROUPS if each in by_name]))


if __name__ == "__main__":
    main()
