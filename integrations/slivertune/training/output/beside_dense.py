"""Bytes and seconds of dense fine-tuning beside a run of the embedded model, measured in a process of its own."""

import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from slivertune.training.assemble import Run
from slivertune.training.options.arguments import DataArguments
from slivertune.training.options.table import RENAMED
from slivertune.training.ranks.launchers import COMPARED
from slivertune.training.run_process import run_process
from slivertune.training.trial import Trial

_ALIKE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "optim",
    "optim_args",
    "bf16",
    "fp16",
    "use_cpu",
    "seed",
    "attn_implementation",
    "weights_dtype",
    "chunked_cross_entropy",
    "keep_activations",
    "offload_activations",
    "token_tile_size",
    *(item.name for item in fields(DataArguments)),
)
"""Options of the run that dense fine-tuning has as well, so that only the method differs."""
_NUM_CYCLES = 3
"""Number of cycles of the dense run. The memory ledger counts the first two, and the last is timed."""
_UPDATES_PER_CYCLE = 16
"""Number of updates of each of them, unless the run itself had fewer."""


def measure_dense(run: Run, console: Console) -> Trial | None:
    """Train a few updates of the embedded model dense, with the run's batches, and measure them.

    Args:
        run: Run that has been trained.
        console: Console that shows the progress.

    Returns:
        Measured figures. None if the run is dense, of another model, on several ranks or a row of a comparison, if
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
    # The run is trained and saved, and a comparison that fails or is interrupted must not fail it.
    except (Exception, KeyboardInterrupt) as error:
        reason = " ".join(str(error).split()) or "it was interrupted"
        run.display.say(f"note: dense fine-tuning was not measured: {reason}")
        return None


def _dense_words(run: Run) -> list[str]:
    """Return the options of a dense run with the same batches."""
    num_updates = max(1, min(_UPDATES_PER_CYCLE, int(run.trainer.state.global_step)))
    words = ["--model_name_or_path", run.source.name_or_path, "--method", "dense"]
    words += ["--max_steps", str(_NUM_CYCLES * num_updates), "--logging_steps", str(num_updates)]
    for name in (RENAMED.get(each, each) for each in _ALIKE):
        value = run.arguments.values.get(name)
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={value}")
    return words
