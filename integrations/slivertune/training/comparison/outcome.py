"""What a run of `slivertune train` came to, and what several of one row come to together."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slivertune.training.output.folders import read_results
from slivertune.training.run_report.figure import measured_bytes
from slivertune.training.run_report.run_log import read_run_log


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run's figures, measured; None where one was not."""

    rate: float
    """The learning rate at the schedule's peak."""
    seed: int
    num_updates: int
    seconds: float | None
    """Of all updates, without evaluation and saving."""
    num_tokens: float | None
    """That the updates read, padding included."""
    before: dict[str, float]
    """`eval_loss`, and `eval_accuracy` where the task has one."""
    after: dict[str, float]
    peak_bytes: dict[str, int]
    """The most that an update had on the device, the host and the disk."""
    curve: tuple[list[float], list[float]]
    """Updates, and the evaluation loss after them."""

    @property
    def metric(self) -> str:
        """What is compared."""
        return "eval_accuracy" if "eval_accuracy" in self.after else "eval_loss"

    @property
    def badness(self) -> float:
        """The metric, such that less is better; infinite where it is no number."""
        value = self.after[self.metric]
        if value != value:
            return float("inf")
        return -value if self.metric == "eval_accuracy" else value


def read_outcome(folder: Path) -> Outcome:
    """Read what a finished run left in its folder.

    Args:
        folder: The run's.

    Raises:
        ValueError: If it has not ended, or its files are damaged.
    """
    results = read_results(folder)
    if results is None:
        raise ValueError(f"{folder} has no results, though its run has ended")
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
    )


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The one with the best metric.

    Args:
        outcomes: Of one row at several rates.
    """
    return min(outcomes, key=lambda each: each.badness)


def mean_badness(outcomes: Sequence[Outcome]) -> float:
    """Of a row's seeds at one rate; infinite where one of them came to no number.

    Args:
        outcomes: One a seed.
    """
    return statistics.fmean(each.badness for each in outcomes)


def mean(values: Sequence[float | None]) -> float | None:
    """Of what was measured; None where something was not."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
