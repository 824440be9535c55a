"""Bytes and seconds of dense fine-tuning beside a run of the embedded model, measured in a process of its own."""

import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from slivertune.training.assemble import Run
from slivertune.training.comparison.processes import run_process
from slivertune.training.options.arguments import DataArguments
from slivertune.training.options.table import RENAMED
from slivertune.training.ranks.launchers import COMPARED
from slivertune.training.trial import Trial

_ALIKE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    "use_cpu",
    "seed",
    *(item.name for item in fields(DataArguments)),
)
"""Options that decide about the bytes and seconds of an update, whatever the method."""
_NUM_CYCLES = 3
"""Number of cycles of the dense run. The memory ledger counts the first two, and the last is timed."""
_UPDATES_PER_CYCLE = 16


def measure_dense(run: Run, console: Console) -> Trial | None:
    """Train a few updates of the embedded model dense, with the run's batches, and measure them.

    Args:
        run: Run that has been trained.
        console: Console that shows the progress.

    Returns:
        What was measured. None if the run is dense, of another model, on several ranks or a row of a comparison, if
        its memory is not measured, or if the dense run fails, which a line says.
    """
    arguments = run.arguments
    is_alone = run.layout == "single" and COMPARED not in os.environ
    is_comparable = arguments.run.memory_ledger != "off" and run.method.name != "dense"
    if arguments.model.model_name_or_path is not None or not (is_alone and is_comparable):
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="slivertune-dense-") as folder:
            measured, words = Path(folder) / "dense.json", _dense_words(run)
            run_process(
                ["-m", "slivertune.training.trial", str(measured), str(_NUM_CYCLES), *words],
                measured.with_suffix(".log"),
                "measuring dense fine-tuning",
                console,
            )
            return Trial(**json.loads(measured.read_text(encoding="utf-8")))
    # A comparison that fails must not fail the run, which is trained and saved.
    except Exception as error:
        run.display.say(f"note: dense fine-tuning was not measured: {' '.join(str(error).split())}")
        return None


def _dense_words(run: Run) -> list[str]:
    """Return the options of a dense run with the same batches."""
    words = ["--model_name_or_path", run.source.name_or_path, "--method", "dense"]
    words += ["--max_steps", str(_NUM_CYCLES * _UPDATES_PER_CYCLE), "--logging_steps", str(_UPDATES_PER_CYCLE)]
    for name in _ALIKE:
        name = RENAMED.get(name, name)
        value = run.arguments.values.get(name)
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words
