"""A few updates of a run, measured in their own process, as the run will be.

    python -m slivertune.training.comparison.trial OUTPUT.json OPTIONS_OF_TRAIN

A cycle of the method is trained to make its state, and another is measured.
"""

import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core import atomic
from slivertune.core.masking import learn, masked
from slivertune.core.typed_command import naming_options
from slivertune.training.assemble import Run, assemble
from slivertune.training.options.parse import parse_train_arguments
from slivertune.training.options.parser import without_unset
from slivertune.training.output.display import make_console, one_voice
from slivertune.training.output.plan_line import DevicePeak

_MEASURED_CYCLES = 2
"""Number of cycles in a trial. The first makes the state and is not timed."""
_QUIET = ("--eval_strategy", "no", "--save_strategy", "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Measurements of a trial."""

    num_updates: int
    """Number of timed updates."""
    seconds_per_update: float
    """Seconds per update, from the first forward to the end of the step."""
    tokens_per_update: float
    """Tokens per update, padding included. 0 if batches have no `input_ids`."""
    peak_bytes: int | None
    """Peak bytes on the device during an update. None if neither CUDA nor the memory ledger measured it."""
    num_rows: int
    """Rows per forward."""
    accumulation: int
    """Forwards per update."""


class _Stopwatch(TrainerCallback):
    """Ends the training after some cycles, and times all but the first."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last_done = 0
        self._start: tuple[int, int, float] | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check whether a cycle is over."""
        metrics = self._run.metrics
        num_done, _ = self._run.method.cycle(state)
        if num_done and self._start is None:
            self._start = (metrics.num_updates, metrics.num_tokens, metrics.seconds)
        if num_done >= _MEASURED_CYCLES:
            control.should_training_stop = True

    def measured(self) -> tuple[int, int, float]:
        """Return updates, tokens and seconds after the first cycle, or of the whole run if it is shorter."""
        metrics = self._run.metrics
        now = (metrics.num_updates, metrics.num_tokens, metrics.seconds)
        start = self._start if self._start is not None and self._start[0] < now[0] else (0, 0, 0.0)
        updates, tokens, seconds = (after - before for after, before in zip(now, start, strict=True))
        return int(updates), int(tokens), seconds


def measure(argv: Sequence[str], console: Console) -> Trial:
    """Train a few updates and measure them, without keeping anything.

    Args:
        argv: Options of `slivertune train`.
        console: Console to write to.
    """
    with tempfile.TemporaryDirectory(prefix="slivertune-trial-") as folder, one_voice(console):
        words = without_unset(argv, ("eval_strategy", "save_strategy", "output_dir"))
        arguments = parse_train_arguments([*words, *_QUIET, "--output_dir", folder])
        run = assemble(arguments, console)
        stopwatch, device_peak = _Stopwatch(run), DevicePeak()
        with closing(run):
            # Nothing is kept, so Ctrl-C ends it at once.
            run.trainer.remove_callback(run.interruption)
            run.trainer.add_callback(device_peak)
            run.trainer.add_callback(stopwatch)
            run.trainer.train()
        updates, tokens, seconds = stopwatch.measured()
        ledger_peak = None if run.ledger is None or run.ledger.peak is None else run.ledger.peak.device
        training = arguments.training
        return Trial(
            num_updates=updates,
            seconds_per_update=seconds / updates,
            tokens_per_update=tokens / updates,
            peak_bytes=device_peak.num_bytes or ledger_peak,
            num_rows=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
        )


@naming_options()
def main(argv: Sequence[str]) -> None:
    """Measure a trial and write the result.

    Args:
        argv: File to write, followed by the options of `slivertune train`.
    """
    learn(argv)
    sys.argv[1:] = masked(list(argv))
    try:
        measured = measure(argv[1:], make_console())
    except Exception as error:
        print(masked("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        sys.exit(1)
    atomic.write_json(Path(argv[0]), asdict(measured))


if __name__ == "__main__":
    main(sys.argv[1:])
