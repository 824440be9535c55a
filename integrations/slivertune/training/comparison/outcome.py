"""Outcome of a run of `slivertune train`, and statistics of several runs of one row."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slivertune.training.folders import read_results
from slivertune.training.run_report.figure import measured_bytes
from slivertune.training.run_report.run_log import read_run_log


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Measured figures of one run. A figure that was not measured is None."""

    rate: float
    """Learning rate at the schedule's peak."""
    seed: int
    num_updates: int
    seconds: float | None
    """Seconds of all updates, without evaluation and saving."""
    num_tokens: float | None
    """Tokens in these updates, padding included."""
    before: dict[str, float]
    """Metrics before training: `eval_loss`, and `eval_accuracy` if the task has one."""
    after: dict[str, float]
    peak_bytes: dict[str, int]
    """Peak bytes of an update by place: device, host and disk."""
    curve: tuple[list[float], list[float]]
    """Numbers of updates, and the evaluation loss after them."""
    chat_template_date: str | None = None
    """Date that the chat template wrote, as 2026-01-31. None if it writes none."""

    @property
    def metric(self) -> str:
        """Name of the compared metric."""
        return "eval_accuracy" if "eval_accuracy" in self.after else "eval_loss"

    @property
    def badness(self) -> float:
        """Metric with such a sign that less is better. Infinite if it is not a number."""
        value = self.after[self.metric]
        if value != value:
            return float("inf")
        return -value if self.metric == "eval_accuracy" else value


def read_outcome(folder: Path) -> Outcome:
    """Read the outcome of a finished run from its folder.

    Args:
        folder: Folder of the run.

    Raises:
        ValueError: If the run has not ended, or its files are damaged.
    """
    results = read_results(folder)
    if results is None:
        raise ValueError(
            f"{folder} has no results, though its run has ended. Delete the folder, and run the same command again"
        )
    settings = results["settings"]
    speed, updates_a_second = results["tokens_per_second"], results["steps_per_second"]
    seconds = results["num_steps"] / updates_a_second if updates_a_second else None
    return Outcome(
        rate=settings["learning_rate"],
        seed=settings["seed"],
        num_updates=results["num_steps"],
        seconds=seconds,
        num_tokens=speed * seconds if speed and seconds else None,
        before=results["before"],
        after=results["after"],
        peak_bytes=measured_bytes(results),
        curve=read_run_log(folder).evaluations("eval_loss"),
        chat_template_date=settings.get("chat_template_date"),
    )


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the best metric.

    Args:
        outcomes: Outcomes of one row at several rates.
    """
    return min(outcomes, key=lambda each: each.badness)


def mean_badness(outcomes: Sequence[Outcome]) -> float:
    """Return the mean badness of a row's seeds at one rate. It is infinite if one metric is not a number.

    Args:
        outcomes: One outcome per seed.
    """
    return statistics.fmean(each.badness for each in outcomes)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of measured values, or None if one was not measured or there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
