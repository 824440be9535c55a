"""The tables of `dial.py`, made from its result file: what README, docs/hift.md and benchmarks/README.md print.

    python benchmarks/dial_table.py              # of results/dial.json
    python benchmarks/dial_table.py trial.json

The best rate of a setting has the best mean over all seeds, of those that all seeds ran and none diverged at.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_table import markdown_table
from result_files import RESULTS, read_json

TITLES = {"language": "language reference: loss", "sst2": "SST-2: accuracy"}
Part = dict[str, Any]
"""A task's part of the result file."""


def best_runs(part: Part, m: str) -> list[dict[str, Any]]:
    """A setting's runs at its best rate, one a seed; none before a rate has all seeds."""
    figure, sign = part["fixed"]["figure"], 1 if part["fixed"]["figure"] == "loss" else -1
    seeds = {run["seed"] for run in part["runs"]}
    candidates = [
        runs
        for runs in _by_rate(part, m).values()
        if {run["seed"] for run in runs} == seeds and not any(run["diverged"] for run in runs)
    ]
    return min(candidates, key=lambda runs: sign * statistics.fmean(run[figure] for run in runs), default=[])


def _by_rate(part: Part, m: str) -> dict[float, list[dict[str, Any]]]:
    runs = sorted(part["runs"], key=lambda run: (run["learning_rate"], run["seed"]))
    of_setting = [run for run in runs if str(run["layers_per_group"]) == m]
    return {
        rate: [run for run in of_setting if run["learning_rate"] == rate]
        for rate in dict.fromkeys(run["learning_rate"] for run in of_setting)
    }


def mean_and_range(figure: str, values: Sequence[float], *, digits: int = 3) -> str:
    """A loss in nats, or an accuracy in percent: the mean, and of several seeds the least and the largest.

    Args:
        figure: `loss` or `accuracy`.
        values: By seed.
        digits: Of a loss.
    """
    every = (*values, statistics.fmean(values))
    words = [f"{value:.{digits}f}" if figure == "loss" else f"{100 * value:.1f}" for value in every]
    unit = "" if figure == "loss" else " %"
    low, high = (words[values.index(each(values))] for each in (min, max))
    return f"{words[-1]}{unit}" + (f" ({low} to {high})" if len(values) > 1 else "")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def summary(content: dict[str, Part]) -> str:
    """One row a setting, with what every task came to and the bytes on the device at the peak."""
    heads = ["`layers_per_group`"]
    for name, part in content.items():
        num_seeds = len({run["seed"] for run in part["runs"]})
        heads += [f"{TITLES[name]} ({num_seeds} seeds)", "rate", "updates", "MB"]
    rows = []
    first = next(iter(content.values()))
    for m, num_groups in first["calibration"]["num_groups"].items():
        cells = [f"{m} (all: dense)" if num_groups == 1 else f"{m} ({num_groups} groups)"]
        for part in content.values():
            best = best_runs(part, m)
            figure = part["fixed"]["figure"]
            cells += [
                mean_and_range(figure, [run[figure] for run in best]) if best else "none yet",
                f"{best[0]['learning_rate']:g}" if best else "",
                str(part["calibration"]["num_updates"][m]),
                _megabytes(part["bytes"][m]["device"]),
            ]
        rows.append(cells)
    return markdown_table(heads, rows)


def details(name: str, part: Part) -> str:
    """A task's table: CPU seconds really spent, the parts of the bytes, and every rate that was tried."""
    figure, num_seeds = part["fixed"]["figure"], len({run["seed"] for run in part["runs"]})
    heads = (f"m, {TITLES[name]}", "CPU s", "MB: weights + gradients + state", "MB on the host", "mean at each rate")
    rows = []
    for m, counted in part["bytes"].items():
        best, rates = best_runs(part, m), []
        for rate, runs in _by_rate(part, m).items():
            num_diverged = sum(run["diverged"] for run in runs)
            if num_diverged:
                rates.append(f"{rate:g}: {num_diverged} of {len(runs)} diverged")
            else:
                mean = mean_and_range(figure, [statistics.fmean(run[figure] for run in runs)])
                rates.append(
                    f"{rate:g}: {mean}" + (f" ({len(runs)} of {num_seeds} seeds)" if len(runs) < num_seeds else "")
                )
        cells = [
            f"{m}: {mean_and_range(figure, [run[figure] for run in best])}" if best else f"{m}: none yet",
            f"{statistics.fmean(run['cpu_seconds'] for run in best):.0f}" if best else "",
            " + ".join(_megabytes(counted[kind]) for kind in ("weights", "gradients", "state")),
            _megabytes(counted["host"]),
            ", ".join(rates),
        ]
        rows.append(cells)
    return markdown_table(heads, rows)


def tables(content: dict[str, Part]) -> str:
    """The summary, then each task's details, with an empty line between."""
    return "\n\n".join([summary(content), *(details(name, part) for name, part in content.items())])


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "dial.json"
    content = read_json(path)
    if not content:
        raise SystemExit(f"{path} has no results; make some with: python benchmarks/dial.py language")
    print(tables(content))
