"""The rows of `evidence.yaml`, what each came to, and the rule by which a claim about them holds."""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markdown_table import mean_and_range

ROWS_FILE = Path(__file__).with_name("evidence.yaml")
_LONGER = re.compile(r"-x(\d+(\.\d+)?)$")
"""The end of a row's name that has so many times as many updates."""


def read_rows_file(path: Path = ROWS_FILE) -> dict[str, Any]:
    """Read tasks, rows and claims; `evidence.yaml` explains its fields itself."""
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def times_as_many_updates(name: str) -> float:
    """Return a row's updates as a multiple of those of the task's other rows."""
    found = _LONGER.search(name)
    return float(found[1]) if found else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRow:
    """A row's figures at its best rate."""

    figure: str
    """`loss`, of which less is better, or `accuracy`."""
    values: tuple[float, ...]
    """By seed."""
    rate: float
    is_at_edge: bool
    """Whether no smaller or no larger rate was tried."""
    peak_bytes: int
    """The most alive on the device in an update, by the ledger."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def cells(self) -> list[str]:
        """Cells of a table: the mean and the range, the rate, and the peak in MB."""
        edge = ", at the edge" if self.is_at_edge else ""
        return [str(self), f"{self.rate:g}{edge}", f"{self.peak_bytes / 1e6:.0f}"]

    def differs(self, other: "MeasuredRow") -> bool:
        """Whether the ranges do not overlap."""
        return max(self.values) < min(other.values) or max(other.values) < min(self.values)

    def is_better(self, other: "MeasuredRow") -> bool:
        """Whether the mean is better."""
        return self.mean < other.mean if self.figure == "loss" else self.mean > other.mean

    def __str__(self) -> str:
        return mean_and_range(self.figure, self.values)


def read_row(row: Mapping[str, Any]) -> MeasuredRow:
    """Read a row of `results/quality.json` that did not fail."""
    runs = row["runs"]
    figure = "accuracy" if "eval_accuracy" in runs[0]["after"] else "loss"
    return MeasuredRow(
        figure=figure,
        values=tuple(run["after"][f"eval_{figure}"] for run in runs),
        rate=runs[0]["rate"],
        is_at_edge=row["is_at_edge"],
        peak_bytes=max(run["peak_bytes"]["device"] for run in runs),
    )


def verdict(relation: str, names: Sequence[str], of_task: Mapping[str, MeasuredRow]) -> str:
    """Decide whether a claim held.

    Args:
        relation: `as good` and `better` hold the first row against the second, `alike` takes any number of rows.
        names: Of the rows.
        of_task: What the rows of a task came to.

    Returns:
        `held`, `not held` or `not decided` and the figures; if a row has one seed, the figures of that alone; nothing
        where a row is missing.
    """
    known = [of_task[name] for name in names if name in of_task]
    if len(known) < len(names):
        return ""
    if min(len(each.values) for each in known) < 2:
        return f"one seed: {'; '.join(mean_and_range(each.figure, each.values[:1]) for each in known)}"
    differ = any(one.differs(other) for one, other in itertools.combinations(known, 2))
    is_better = known[0].is_better(known[1])
    if relation == "better" and not differ:
        word = "not decided"
    elif relation == "alike":
        word = "not held" if differ else "held"
    else:
        word = "not held" if differ and not is_better else "held"
    return f"**{word}**: {'; '.join(map(str, known))}"
