"""Planned tokens/s against those that others have published.

Each run of a software on a card gives one figure away: its efficiency, the share of the card's peak that it reaches, is
fitted on one row, named first, and the other rows are predicted with it. A row alone would prove nothing. Four
predictions have a target, 20 %; the others stand beside with their errors and the part of the step that explains them.
Nothing is run but plans. The rows lie in plan_speeds.yaml.

    OMP_NUM_THREADS=1 python benchmarks/plan_speeds.py          # ten minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/plan_speeds.py --groups Qwen
"""

import dataclasses
from typing import Any

from markdown_table import markdown_table
from published_rows import PublishedRows

from slivertune.planning.cards import card_named
from slivertune.planning.collectives import mean_state_bytes
from slivertune.planning.planned_time import PlannedTime, plan_time

TARGET = 0.2
_MOST = 1.15
PUBLISHED = PublishedRows.read("plan_speeds.yaml")
_OF_GROUP = {"name", "source", "card", "assumed", "is_compiled", "rows"}
_OF_ROW = {"name", "model", "settings", "tokens_per_second", "seconds", "gib", "explained_by"}
_OF_ROW |= {"has_target", "has_no_trainer", "is_paged"}
for _group in PUBLISHED.groups.values():
    if unknown := _group.keys() - _OF_GROUP | {key for row in _group["rows"] for key in row.keys() - _OF_ROW}:
        raise ValueError(f"plan_speeds.yaml, {_group['name']}: {sorted(unknown)} mean nothing here")


class PlannedRow:
    """A row, planned once; its time at any efficiency.

    Args:
        row: The row, as it stands in the file.
        group: The row's.
    """

    def __init__(self, row: dict[str, Any], group: dict[str, Any]) -> None:
        self._card, self._is_compiled = card_named(group["card"]), group.get("is_compiled", False)
        self._is_paged = row.get("is_paged", False)
        self._plan = PUBLISHED.plan(row)

    def at(self, efficiency: float) -> PlannedTime:
        """Return the seconds per update if this share of the peak rate is reached."""
        rates = self._card.rates(efficiency=efficiency, is_compiled=self._is_compiled)
        time = plan_time(self._plan, rates)
        if not self._is_paged:
            return time
        pages = 2 * mean_state_bytes(self._plan) / rates.bus_bandwidth
        update = dataclasses.replace(time.update, waiting={**time.update.waiting, "pages": pages})
        return dataclasses.replace(time, update=update)

    def published(self, row: dict[str, Any]) -> float:
        """Return the tokens/s that the row's source gives, or that follow from its seconds per update."""
        if "seconds" not in row:
            return float(row["tokens_per_second"])
        return float(self.at(1.0).num_tokens / row["seconds"])


def fitted(planned: PlannedRow, tokens_per_second: float) -> float | None:
    """Find the efficiency at which a row takes the published time; None if none is fast enough.

    Cards run above the clock for which their vendors give the peak, so that it may be a little more than 1.
    """
    if planned.at(_MOST).tokens_per_second < tokens_per_second:
        return None
    low, high = 0.01, _MOST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if planned.at(middle).tokens_per_second < tokens_per_second else (low, middle)
    return high


def predict(group: dict[str, Any]) -> dict[str, Any]:
    """Fit a group's first row, and predict the others."""
    rows: list[dict[str, Any]] = []
    efficiency: float | None = None
    for row in group["rows"]:
        planned = PlannedRow(row, group)
        published = planned.published(row)
        if not rows:
            efficiency = fitted(planned, published)
            if efficiency is None:
                raise ValueError(f"{row['name']}: {published} tokens/s are more than the card can do")
        assert efficiency is not None
        time = planned.at(efficiency)
        error = time.tokens_per_second / published - 1
        rows.append(
            {
                **{name: row[name] for name in ("name", "model", "settings")},
                "published_tokens_per_second": published,
                **({"published_gib": row["gib"]} if "gib" in row else {}),
                "planned_tokens_per_second": time.tokens_per_second,
                "error": error,
                "is_fitted": not rows,
                "is_met": abs(error) <= TARGET if row.get("has_target") else None,
                "explained_by": row.get("explained_by", ""),
                "time": time.to_json(),
            }
        )
        speeds = f"{time.tokens_per_second:,.0f}, published {published:,.0f}"
        print(f"{group['name']}: {row['name']}: {speeds}", flush=True)
    about = {name: group.get(name, "") for name in ("name", "source", "card", "assumed")}
    return {**about, "efficiency": efficiency, "rows": rows}


def table(groups: list[dict[str, Any]]) -> str:
    """Format the rows in Markdown."""
    lines = []
    for group in groups:
        for row in group["rows"]:
            error = f"{100 * row['error']:+.1f} %"
            if row["is_fitted"]:
                error = f"fitted: {100 * group['efficiency']:.0f} % of the peak"
            if row["is_met"] is not None:
                error += f" ({'within' if row['is_met'] else 'not within'} {100 * TARGET:.0f} %)"
            speeds = [f"{row[f'{kind}_tokens_per_second']:,.0f}" for kind in ("published", "planned")]
            lines.append([group["source"], row["name"], *speeds, error])
    return markdown_table(["Source", "Run", "published", "planned", "error"], lines)


if __name__ == "__main__":
    PUBLISHED.run(predict, table, __doc__, "plan_speeds.json", target=TARGET)
