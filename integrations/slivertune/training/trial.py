"""A few updates of a run, measured in their own process, as the run will be.

    python -m slivertune.training.trial OUTPUT.json NUM_CYCLES OPTIONS_OF_TRAIN

Only the last cycle of the method is timed: the first makes its state.
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
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.device_peak import DevicePeak
from slivertune.training.display import make_console, one_voice
from slivertune.training.options.parser import without_unset

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
    highest_bytes: dict[str, int] | None = None
    """Highest number of bytes of each kind on the memory ledger. None if it is off."""


class _Stopwatch(TrainerCallback):
    """Ends the training after some cycles, and times the last of them."""

    def __init__(self, run: Run, num_cycles: int) -> None:
        self._run = run
        self._num_cycles = num_cycles
        self._last_done = 0
        self._start: tuple[int, int, float] | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check whether a cycle is over."""
        metrics = self._run.metrics
        num_done, _ = self._run.method.cycle(state)
        if num_done >= self._num_cycles - 1 and self._start is None:
            self._start = (metrics.num_updates, metrics.num_tokens, metrics.seconds)
        if num_done >= self._num_cycles:
            control.should_training_stop = True

    def measured(self) -> tuple[int, int, float]:
        """Return updates, tokens and seconds of the last cycle, or of the whole run if it is shorter."""
        metrics = self._run.metrics
        now = (metrics.num_updates, metrics.num_tokens, metrics.seconds)
        start = self._start if self._start is not None and self._start[0] < now[0] else (0, 0, 0.0)
        updates, tokens, seconds = (after - before for after, before in zip(now, start, strict=True))
        return int(updates), int(tokens), seconds


def measure(argv: Sequence[str], console: Console, *, num_cycles: int = 2) -> Trial:
    """Train a few updates and measure them, without keeping anything.

    Args:
        argv: Options of `slivertune train`.
        console: Console to write to.
        num_cycles: Number of cycles. The last one is timed. The memory ledger may slow the first two.
    """
    with tempfile.TemporaryDirectory(prefix="slivertune-trial-") as folder, one_voice(console):
        words = without_unset(argv, ("eval_strategy", "save_strategy", "output_dir"))
        arguments = parse_train_arguments([*words, *_QUIET, "--output_dir", folder])
        run = assemble(arguments, console)
        stopwatch, device_peak = _Stopwatch(run, num_cycles), DevicePeak()
        with closing(run):
            # Nothing is kept, so Ctrl-C ends it at once.
            run.trainer.remove_callback(run.interruption)
            run.trainer.add_callback(device_peak)
            run.trainer.add_callback(stopwatch)
            run.trainer.train()
        updates, tokens, seconds = stopwatch.measured()
        ledger_peak = None if run.ledger is None or run.ledger.peak is None else run.ledger.peak.device
        highest = None if run.ledger is None else run.ledger.highest
        training = arguments.training
        return Trial(
            num_updates=updates,
            seconds_per_update=seconds / updates,
            tokens_per_update=tokens / updates,
            peak_bytes=device_peak.num_bytes or ledger_peak,
            num_rows=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            highest_bytes=None if highest is None else asdict(highest),
        )


@naming_options()
def main(argv: Sequence[str]) -> None:
    """Measure a trial and write the result.

    Args:
        argv: File to write, number of cycles, and the options of `slivertune train`.
    """
    learn(argv)
    sys.argv[1:] = masked(list(argv))
    try:
        measured = measure(argv[2:], make_console(), num_cycles=int(argv[1]))
    except Exception as error:
        print(masked("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        sys.exit(1)
    atomic.write_json(Path(argv[0]), asdict(measured))


if __name__ == "__main__":
    main(sys.argv[1:])
