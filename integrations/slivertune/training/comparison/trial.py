"""A few updates of a run, measured: what one of them takes. A process of its own, as the run will be.

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
"""At the end of the last one a trial ends; the first makes the state, and is not timed."""
_QUIET = ("--eval_strategy", "no", "--save_strategy", "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was measured."""

    num_updates: int
    """That were timed."""
    seconds_per_update: float
    """From the first forward to the end of the step."""
    tokens_per_update: float
    """Padding included; 0 where batches have no `input_ids`."""
    peak_bytes: int | None
    """The most alive on the device in an update; None without the memory ledger."""
    num_rows: int
    """Of a forward."""
    accumulation: int
    """Forwards of an update."""


class _Stopwatch(TrainerCallback):
    """Ends the training after some cycles, and times all but the first."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last_done = 0
        self._start: tuple[int, int, float] | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See whether a cycle is over."""
        metrics = self._run.metrics
        num_done, _ = self._run.method.cycle(state)
        if num_done and self._start is None:
            self._start = (metrics.num_updates, metrics.num_tokens, metrics.seconds)
        if num_done >= _MEASURED_CYCLES:
            control.should_training_stop = True

    def measured(self) -> tuple[int, int, float]:
        """Updates, tokens and seconds after the first cycle; of all, where a run is shorter than that."""
        metrics = self._run.metrics
        now = (metrics.num_updates, metrics.num_tokens, metrics.seconds)
        start = self._start if self._start is not None and self._start[0] < now[0] else (0, 0, 0.0)
        updates, tokens, seconds = (after - before for after, before in zip(now, start, strict=True))
        return int(updates), int(tokens), seconds


def measure(argv: Sequence[str], console: Console) -> Trial:
    """Train a few updates; nothing of them is kept.

    Args:
        argv: What would follow `slivertune train`, without a folder.
        console: Where to write.
    """
    with tempfile.TemporaryDirectory(prefix="slivertune-trial-") as folder, one_voice(console):
        words = without_unset(argv, ("eval_strategy", "save_strategy", "output_dir"))
        arguments = parse_train_arguments([*words, *_QUIET, "--output_dir", folder])
        run = assemble(arguments, console)
        stopwatch, device_peak = _Stopwatch(run), DevicePeak()
        with closing(run):
            # Nothing is kept: Ctrl-C ends it at once.
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
    """Measure, and write what was measured.

    Args:
        argv: The file, and the options of `slivertune train`.
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
