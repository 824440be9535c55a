"""Report of a run: lines before it starts, a table at its end, and `results.json` with the same figures."""

import platform
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from slivertune import __version__
from slivertune.core import atomic
from slivertune.core.ledger import Census
from slivertune.core.masking import masked
from slivertune.core.options import enum_value
from slivertune.core.typed_command import typed_command
from slivertune.planning.planned_time import PlannedTime
from slivertune.sft.delta_parameters import DELTA_PARAMETERS_NAME
from slivertune.training.assemble import Run
from slivertune.training.folders import RESULTS_NAME
from slivertune.training.methods.method import Saved
from slivertune.training.methods.tokens import tokens_line
from slivertune.training.output.largest_batch import BatchSize
from slivertune.training.trial import Trial

_PEAK_ROWS = {
    "parameters": "weights",
    "gradients": "gradients",
    "state": "state on the device",
    "residual": "activations and other",
    "host": "state on the host",
    "disk": "state on disk",
}
_NAME_WIDTH = 28
"""Width of the column of names, so that figures and files stand in line."""


def platform_versions() -> dict[str, str]:
    """Return the versions of the software on which the figures depend."""
    return {
        "slivertune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One evaluation row with the model's answers before and after training."""

    prompt: str
    before: str | None
    """Answer before training. None if a resumed run doesn't know it."""
    after: str
    expected: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results(Saved):
    """Measured figures of a run. A figure that was not measured is None."""

    method: str
    model: str
    dataset: str
    num_parameters: int
    num_trained: int
    """Number of parameters that the method trains."""
    device: str
    """Device of the first process."""
    world_size: int
    """Number of processes that trained together."""
    layout: str
    """Layout of the processes: single, ddp, fsdp2, zero1, zero2 or zero3."""
    settings: dict[str, Any]
    before: dict[str, float]
    """Metrics before training: `eval_loss`, and `eval_accuracy` if the task has one."""
    after: dict[str, float]
    num_steps: int
    steps_per_second: float | None
    """Updates per second, without evaluation and saving. In a resumed run, only updates since the resume count."""
    num_skipped: int
    """Number of updates skipped because a loss or gradient was not finite."""
    peak: Census | None
    """Bytes by kind at the moment of the largest total on the device, during updates."""
    highest: Census | None
    """Highest number of bytes of each kind during updates. The moments differ."""
    planned_peak_bytes: int | None
    """Planned peak memory on the device, in bytes."""
    measured_peak_bytes: int | None
    """Measured peak memory on the device, in bytes, to compare with the planned one."""
    planned_host_bytes: int | None = None
    """Planned host memory for offloaded data, in bytes."""
    planned_disk_bytes: int | None = None
    """Planned disk space for offloaded data, in bytes."""
    planned_batch: BatchSize | None = None
    """Batch to which the planned peak applies."""
    largest_batch: BatchSize | None = None
    """Trained batch with the most tokens, which determines the measured peak."""
    planned_update: PlannedTime | None = None
    """Planned time of an update. None if it was not planned, as on a CPU."""
    planned_update_note: str | None = None
    """Parts that the planned time leaves out, or the reason why there is no time."""
    tokens_per_second: float | None = None
    """Tokens per second of training updates, padding included, over all processes. None if they were not counted."""
    best_checkpoint: Path | None = None
    """Checkpoint with the run's final model, under `--load_best_model_at_end`. None if the final model is the last."""
    checkpoint: Path | None
    sample: Sample | None
    dense: Trial | None = None
    """Dense fine-tuning of the embedded model on the same batches. None if it was not measured."""
    command: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=platform_versions)

    def as_json(self) -> dict[str, Any]:
        """Return plain containers, with the peak in bytes by kind."""
        values = asdict(self)
        values["peak_bytes"] = None if self.peak is None else {**values["peak"], "device": self.peak.device}
        values["highest_bytes"] = values.pop("highest")
        if self.planned_update is not None:
            values["planned_update"] = self.planned_update.to_json()
        del values["peak"]
        for name in ("model_folder", "delta_folder", "best_checkpoint", "checkpoint"):
            values[name] = None if values[name] is None else str(values[name])
        return values


def write_results(results: Results, output_folder: Path) -> Path:
    """Write `results.json`.

    Args:
        results: Figures of the run.
        output_folder: Folder of the run.

    Returns:
        Path of the file.
    """
    path = output_folder / RESULTS_NAME
    atomic.write_json(path, masked(results.as_json()))
    return path


def print_results(results: Results, console: Console, results_path: Path, picture: Path | None = None) -> None:
    """Print the table and the sample.

    Args:
        results: Figures of the run.
        console: Console to write to.
        results_path: File with the same figures.
        picture: Picture of the run's log, if it was drawn.
    """
    table = Table("", Column("before", justify="right"), Column("after", justify="right"))
    table.add_row("evaluation loss", f"{results.before['eval_loss']:.4f}", f"{results.after['eval_loss']:.4f}")
    if "eval_accuracy" in results.after:
        table.add_row(
            "evaluation accuracy", f"{results.before['eval_accuracy']:.2%}", f"{results.after['eval_accuracy']:.2%}"
        )
    console.print(
        masked(f"\n{results.method}: {results.num_steps} updates of {results.model} on {results.dataset}"),
        markup=False,
        soft_wrap=not console.is_terminal,
    )
    console.print(table)
    console.print(_measured(results))
    console.print(_files(results, results_path, picture))
    if results.sample is not None:
        _print_sample(results.sample, console)


def _measured(results: Results) -> Table:
    """Return bytes and speeds, with those of dense fine-tuning in a column of their own if they were measured."""
    highest, dense = results.highest, _dense_cells(results.dense)
    sizes = {} if highest is None else {title: getattr(highest, name) for name, title in _PEAK_ROWS.items()}
    rows = (
        ("peak on the device", _measured_and_planned(results)),
        *((f"  peak {title}", _megabytes(size)) for title, size in sizes.items() if size or title != "state on disk"),
        ("time per step", results.steps_per_second and _milliseconds(1 / results.steps_per_second)),
        ("tokens/s", _measured_and_planned_speed(results)),
        ("updates/s", results.steps_per_second and f"{results.steps_per_second:.2f}"),
    )
    if not dense:
        return _grid(rows)
    table = Table("", Column(results.method, justify="right"), Column("dense", justify="right"))
    for name, value in rows:
        if value:
            table.add_row(name, value, dense.get(name, ""))
    return table


def _files(results: Results, results_path: Path, picture: Path | None) -> Table:
    merge_command = results.merge_command
    reason = "sharded weights don't hold the deltas. To save it: "
    if merge_command is not None and "--allow_quantized_base" in merge_command:
        reason = "4-bit weights can't hold the deltas. To save a close one, on the base's weights: "
    return _grid(
        (
            ("updates skipped", results.num_skipped and f"{results.num_skipped} (a loss or gradient was not finite)"),
            ("model", results.model_folder),
            ("deltas", results.delta_folder),
            ("model", merge_command and f"not saved, since {reason}{shlex.join(typed_command(*merge_command[1:]))}"),
            ("ends with", results.best_checkpoint and f"the model of {results.best_checkpoint}, the best evaluated"),
            ("last checkpoint", results.checkpoint),
            ("figures", results_path),
            ("picture", picture),
        )
    )


def _grid(rows: Iterable[tuple[str, object]]) -> Table:
    grid = Table.grid(Column(min_width=_NAME_WIDTH), Column(overflow="fold"), padding=(0, 2))
    for name, value in rows:
        if value:
            grid.add_row(name, Text(masked(str(value))))
    return grid


def _dense_cells(dense: Trial | None) -> dict[str, str]:
    """Return the figures of dense fine-tuning by the names of their rows."""
    if dense is None:
        return {}
    sizes = {} if dense.highest_bytes is None else {_PEAK_ROWS[name]: dense.highest_bytes[name] for name in _PEAK_ROWS}
    return {
        **({} if dense.peak_bytes is None else {"peak on the device": _megabytes(dense.peak_bytes)}),
        **{f"  peak {title}": _megabytes(size) for title, size in sizes.items()},
        "time per step": _milliseconds(dense.seconds_per_update),
        "tokens/s": f"{dense.tokens_per_update / dense.seconds_per_update:,.0f}",
        "updates/s": f"{1 / dense.seconds_per_update:.2f}",
    }


def _measured_and_planned(results: Results) -> str | None:
    measured, planned = results.measured_peak_bytes, results.planned_peak_bytes
    if measured is None or planned is None:
        return None if measured is None else _megabytes(measured)
    asked, ran = results.planned_batch, results.largest_batch
    if asked is None or ran is None or asked.total <= ran.total:
        if results.device.startswith("cuda") and results.settings.get("prefetch_bytes") == "auto":
            prefetched = "with prefetched state, which may fill free memory"
            return f"{_megabytes(measured)} {prefetched}; planned {_megabytes(planned)} without"
        return f"{_megabytes(measured)}, planned {_megabytes(planned)} ({planned / measured - 1:+.1%})"
    batches = f"rows of {asked.num_tokens} tokens; the longest that ran had {ran.num_tokens}"
    if asked.num_rows != ran.num_rows:
        batches = (
            f"{asked.num_rows} rows of {asked.num_tokens} tokens; the largest batch that ran had {ran.num_rows} of "
            f"{ran.num_tokens}"
        )
    return f"{_megabytes(measured)}, planned {_megabytes(planned)} for {batches}"


def _measured_and_planned_speed(results: Results) -> str | None:
    measured, planned, note = results.tokens_per_second, results.planned_update, results.planned_update_note
    if measured is None:
        return None
    parts = [f"{measured:,.0f}"]
    if planned is not None:
        speed = planned.tokens_per_second
        parts.append(f"planned {speed:,.0f} ({speed / measured - 1:+.1%})")
    return ", ".join([*parts, *([note] if note else [])])


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms/update"


def _print_sample(sample: Sample, console: Console) -> None:
    parts = {"prompt": sample.prompt, "before": sample.before, "after": sample.after, "in the data": sample.expected}
    console.print("\nSample")
    for name, text in parts.items():
        if text is not None:
            console.print(f"[{name}]", style="bold", markup=False, highlight=False)
            console.print(Text(masked(text.strip("\n"))), soft_wrap=not console.is_terminal)


def describe(run: Run) -> None:
    """Describe a run before it starts.

    Args:
        run: Run from `assemble`.
    """
    say, training, arguments = run.display.say, run.arguments.training, run.arguments
    model: Any = run.trainer.model
    say(f"slivertune {__version__}: {run.method.name} on {run.model_name}")
    say(f"  model   {run.num_parameters:,} weights in {_kinds_of_weights(model)} on {training.device}{_trained(run)}")
    say(
        f"  data    {run.dataset_name}: {len(run.task.train_dataset):,} rows to train on, "
        f"{len(run.task.eval_dataset):,} to evaluate on, up to {run.task.max_length} tokens each"
    )
    for note in run.task.notes:
        say(f"  data    {note}")
    say(_batch(run))
    for line in run.method.lines():
        say(line)
    if run.parked is not None:
        parked = arguments.parked
        form = "exact" if parked.waiting is None else f"linear ones in {parked.waiting}, also in evaluation"
        say(f"  parked  {len(run.parked.names)} frozen tensors of the blocks, {form}, on the {parked.weights}")
    if run.tokens is not None:
        say(tokens_line(run.tokens))
    if run.kept is not None:
        number = "as many as fit" if arguments.run.keep_activations == "auto" else str(run.kept.num_kept)
        say(f"  keeps   activations of {number} of {len(run.kept.blocks)} checkpointed blocks, from the top")
    if run.offloaded is not None:
        say(f"  offload inputs of {len(run.offloaded.blocks)} checkpointed blocks, to host memory")
    if run.tiles is not None:
        say(f"  tiles   of {arguments.run.token_tile_size:,} tokens in {len(run.tiles.paths)} MLPs and norms")
    schedule = enum_value(training.lr_scheduler_type)
    decay = arguments.run.layerwise_lr_decay
    by_layer = "" if decay == 1 else f", times {decay:g} from layer to layer below"
    say(f"  rate    {training.learning_rate:g}{by_layer}, {run.method.optimizer_name(training)}, {schedule} schedule")
    say(f"  writes  {training.output_dir}")
    is_own_rate = arguments.model.model_name_or_path is None or "learning_rate" in arguments.given
    notes = run.method.notes(model, learning_rate=None if is_own_rate else training.learning_rate)
    for note in (*notes, *arguments.folder.notes):
        say(f"note: {note}")
    if arguments.folder.checkpoint is not None:
        say(f"note: continuing from {arguments.folder.checkpoint}")


def _batch(run: Run) -> str:
    """Describe the number of rows per update and its factors."""
    training = run.arguments.training
    rows, accumulated, ranks = (
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
        training.world_size,
    )
    parts = [f"{rows} at a time"]
    parts += [f"{accumulated} times"] if accumulated > 1 else []
    parts += [f"on each of {ranks} ranks ({run.layout})"] if ranks > 1 else []
    return f"  batch   {rows * accumulated * ranks} rows per update: {', '.join(parts)}"


def _kinds_of_weights(model: torch.nn.Module) -> str:
    """Return the data types of the weights, such as "float32" or "bfloat16/nf4", without SFT's deltas."""
    return "/".join(
        sorted(
            {
                str(parameter.dtype).removeprefix("torch.") if quantised is None else str(quantised.quant_type)
                for name, parameter in model.named_parameters()
                if DELTA_PARAMETERS_NAME not in name.split(".")
                for quantised in [getattr(parameter, "quant_state", None)]
            }
        )
    )


def _trained(run: Run) -> str:
    if run.num_trained == run.num_parameters:
        return ""
    return f", {run.num_trained:,} of them trained ({run.num_trained / run.num_parameters:.2%})"
