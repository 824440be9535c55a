"""What a row of `quality.py` came to, as its result file has it."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markdown_table import mean_and_range


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
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def cells(self) -> list[str]:
        """Of a table: the mean and the range, the rate, and the peak in MB."""
        edge = ", at the edge" if self.is_at_edge else ""
        return [str(self), f"{self.rate:g}{edge}", f"{self.peak_bytes / 1e6:.0f}"]

    def differs(self, other: "MeasuredRow") -> bool:
        """Whether the ranges do not overlap."""
        return max(self.values) < min(other.values) or max(other.values) < min(self.values)

    def is_better(self, other: "MeasuredRow") -> bool:
        """By the mean."""
        return self.mean < other.mean if self.figure == "loss" else self.mean > other.mean

    def __str__(self) -> str:
        return mean_and_range(self.figure, self.values)


def read_row(row: Mapping[str, Any]) -> MeasuredRow:
    """Read a row that did not fail.

    Args:
        row: Of the result file.
    """
    runs = row["runs"]
    figure = "accuracy" if "eval_accuracy" in runs[0]["after"] else "loss"
    return MeasuredRow(
        figure=figure,
        values=tuple(run["after"][f"eval_{figure}"] for run in runs),
        rate=runs[0]["rate"],
        is_at_edge=row["is_at_edge"],
        peak_bytes=max(run["peak_bytes"]["device"] for run in runs),
    )
