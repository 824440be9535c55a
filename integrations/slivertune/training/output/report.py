"""What a run ends with: a table for people, and `results.json` with the same figures."""

from __future__ import annotations

import platform
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slivertune import __version__
from slivertune.core import atomic
from slivertune.core.ledger import Census
from slivertune.training.output.folders import RESULTS_NAME
from slivertune.training.output.plan_line import Peaks

_PEAK_ROWS = {
    "parameters": "weights",
    "gradients": "gradients",
    "state": "state on the device",
    "residual": "activations and other",
    "host": "state on the host",
    "disk": "state on disk",
}


def platform_versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    return {
        "slivertune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One evaluation row as the model answered it before and after."""

    prompt: str
    before: str | None
    """None where a resumed run doesn't know it."""
    after: str
    expected: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The figures of a run. Measured, each; what was not measured is None."""

    method: str
    model: str
    dataset: str
    num_parameters: int
    num_trained: int
    """How many of them the method trains."""
    device: str
    """The first process's."""
    world_size: int
    """Processes that trained together."""
    layout: str
    """How they shared the work: single, ddp, fsdp2, zero1, zero2 or zero3."""
    settings: dict[str, Any]
    before: dict[str, float]
    """`eval_loss`, and `eval_accuracy` where the task has one."""
    after: dict[str, float]
    num_steps: int
    steps_per_second: float | None
    """Updates alone, without evaluation and saving; of this process, where the run was resumed."""
    num_skipped: int
    """Updates skipped because a loss or gradient was not finite."""
    peak: Census | None
    """Bytes alive at the moment of the largest total on the device, during updates."""
    highest: Census | None
    """Each kind's own highest value during updates; the moments differ."""
    peaks: Peaks
    """The planned peak on the device, and the measured one to hold against it."""
    model_folder: Path | None
    """None where deltas are all that was saved."""
    checkpoint: Path | None
    sample: Sample | None
    delta_folder: Path | None = None
    """Where SFT's deltas lie."""
    merge_command: tuple[str, ...] | None = None
    """Makes a model of the deltas, where there is none."""
    command: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=platform_versions)

    def as_json(self) -> dict[str, Any]:
        """Plain containers; the peak in bytes by kind."""
        values = asdict(self)
        values["peak_bytes"] = None if self.peak is None else {**values["peak"], "device": self.peak.device}
        values["highest_bytes"] = values["highest"]
        values["planned_peak_bytes"], values["measured_peak_bytes"] = self.peaks.planned, self.peaks.measured
        del values["peak"], values["highest"], values["peaks"]
        for name in ("model_folder", "delta_folder", "checkpoint"):
            values[name] = None if values[name] is None else str(values[name])
        return values


def write_results(results: Results, output_folder: Path) -> Path:
    """Write `results.json`.

    Args:
        results: The figures.
        output_folder: The run's folder.

    Returns:
        The file.
    """
    path = output_folder / RESULTS_NAME
    atomic.write_json(path, results.as_json())
    return path


def print_results(results: Results, console: Console, results_path: Path) -> None:
    """Print the table and the sample.

    Args:
        results: The figures.
        console: Where to.
        results_path: Where the same figures lie.
    """
    table = Table()
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row("evaluation loss", f"{results.before['eval_loss']:.4f}", f"{results.after['eval_loss']:.4f}")
    if "eval_accuracy" in results.after:
        table.add_row(
            "evaluation accuracy", f"{results.before['eval_accuracy']:.2%}", f"{results.after['eval_accuracy']:.2%}"
        )
    console.print(
        f"\n{results.method}: {results.num_steps} updates of {results.model} on {results.dataset}",
        markup=False,
        soft_wrap=True,
    )
    console.print(table)
    console.print(_figures(results, results_path))
    if results.sample is not None:
        _print_sample(results.sample, console)


def _figures(results: Results, results_path: Path) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    if results.peaks.measured is not None:
        grid.add_row("peak on the device", _measured_and_planned(results.peaks))
    if results.highest is not None:
        for name, title in _PEAK_ROWS.items():
            num_bytes = getattr(results.highest, name)
            if num_bytes or name != "disk":
                grid.add_row(f"  most {title}", _megabytes(num_bytes))
    if results.steps_per_second is not None:
        grid.add_row("updates a second", f"{results.steps_per_second:.2f}")
    if results.num_skipped:
        grid.add_row("updates skipped", f"{results.num_skipped} (a loss or gradient was not finite)")
    if results.model_folder is not None:
        grid.add_row("model", Text(str(results.model_folder)))
    if results.delta_folder is not None:
        grid.add_row("deltas", Text(str(results.delta_folder)))
    if results.merge_command is not None:
        reason = "sharded weights don't hold the deltas; it comes by: "
        if "--allow_quantized_base" in results.merge_command:
            reason = "4-bit weights can't hold the deltas; nearly the same, on the base's weights, comes by: "
        grid.add_row("model", Text(f"not saved, as {reason}{shlex.join(results.merge_command)}"))
    if results.checkpoint is not None:
        grid.add_row("last checkpoint", Text(str(results.checkpoint)))
    grid.add_row("figures", Text(str(results_path)))
    return grid


def _measured_and_planned(peaks: Peaks) -> str:
    measured = peaks.measured or 0
    if peaks.planned is None:
        return _megabytes(measured)
    return f"{_megabytes(measured)}, planned {_megabytes(peaks.planned)} ({peaks.planned / measured - 1:+.1%})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _print_sample(sample: Sample, console: Console) -> None:
    parts = {"prompt": sample.prompt, "before": sample.before, "after": sample.after, "in the data": sample.expected}
    console.print("\nSample")
    for name, text in parts.items():
        if text is not None:
            console.print(f"[{name}]", style="bold", markup=False, highlight=False)
            console.print(Text(text.strip("\n")), soft_wrap=True)
