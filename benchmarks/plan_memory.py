"""Planned peaks of GPU memory against those that others have measured.

Nothing is run but plans. The rows lie in plan_memory.yaml.

    OMP_NUM_THREADS=1 python benchmarks/plan_memory.py          # minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/plan_memory.py --groups fitcheck
"""

from typing import Any

from markdown_table import markdown_table
from published_rows import PublishedRows

EXPLAINED_FROM = 0.1
"""Error from which a row says what is known of it."""
UNITS = {"mib": 2**20, "gib": 2**30, "gb": 1e9}
PUBLISHED = PublishedRows.read("plan_memory.yaml")


def measured_bytes(row: dict[str, Any]) -> float:
    """Return a row's measured peak in bytes."""
    (unit,) = row.keys() & UNITS
    return float(row[unit] * UNITS[unit])


def planned_bytes(row: dict[str, Any]) -> int:
    """Return the planned peak of a row, without allowances."""
    peak = PUBLISHED.plan(row).peak
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


if __name__ == "__main__":
    PUBLISHED.run(plan_rows, table, __doc__, "plan_memory.json")
