"""What a run shows while it goes on: lines above, a progress bar below; lines alone where there is no terminal.

One voice: the run's own lines, and nothing that libraries print for their own sake.
"""

import logging
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import datasets
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core.masking import masked
from slivertune.interop.training_metrics import TOKENS_PER_SECOND

_SUMMARIES = ("train_loss", "eval_runtime")
"""What tells the Trainer's summary of a run, and an evaluation, from an ordinary log."""
_WIDTH_WITHOUT_TERMINAL = 120
_SHOWN_AS = {"grad_norm": "gradient norm", "learning_rate": "rate"}
_NOT_SHOWN = ("epoch", "skipped_updates")
_HEADING = re.compile(r" {2}\S+ +")
"""What begins a line of the table that opens a run: `  model   `."""
_INDENT = 4


class Display(TrainerCallback):
    """Takes the place of the Trainer's own progress bar and printed dictionaries.

    Args:
        console: Where to write.
        bar: Whether to draw the bar; the lines stay.
    """

    def __init__(self, console: Console, *, bar: bool = True) -> None:
        self._console = console
        self._progress = make_progress(console, enabled=bar)
        self._task: Any = None
        self._evaluation: Any = None
        self.before_training: Callable[[], None] | None = None
        """Called before the first update, when the model is as its layout has it, and before the bar is there."""

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        _print(self._console, line)

    def close(self) -> None:
        """Take the bar away; harmless when there is none."""
        self._progress.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the bar, after what comes before training."""
        if self.before_training is not None:
            self.before_training()
        self._task = self._progress.add_task("training", total=state.max_steps, completed=state.global_step, status="")
        self._progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print what the Trainer logs."""
        logs: dict[str, Any] = kwargs["logs"]
        if not state.is_local_process_zero or state.max_steps == 0 or any(name in logs for name in _SUMMARIES):
            return
        # What has a slash is for trackers.
        parts = [
            _describe(name, value)
            for name, value in logs.items()
            if name not in _NOT_SHOWN and "/" not in name and not name.startswith("train_")
        ]
        self.say(f"step {state.global_step:>4}/{state.max_steps}  {'  '.join(parts)}")
        if self._task is not None:
            known = (_describe(name, logs[name]) for name in ("loss", TOKENS_PER_SECOND) if name in logs)
            self._progress.update(self._task, status="  ".join(known))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the evaluation's bar away, and print its figures if it is one of those in mid-run."""
        if self._evaluation is not None:
            self._progress.remove_task(self._evaluation)
            self._evaluation = None
        if self._task is not None and state.global_step < state.max_steps:
            self.say(
                f"step {state.global_step:>4}/{state.max_steps}  evaluation: {describe_metrics(kwargs['metrics'])}"
            )

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the evaluation's bar."""
        if self._evaluation is None:
            loader: Any = kwargs.get("eval_dataloader")
            total = len(loader) if hasattr(loader, "__len__") else None
            self._evaluation = self._progress.add_task("evaluating", total=total, status="")
        self._progress.advance(self._evaluation)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the bar away."""
        self.close()


def make_progress(console: Console, *, enabled: bool = True) -> Progress:
    """A progress bar with counts and times, and what a task's field `status` says; as wide as the console."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        expand=True,
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
    )


def _describe(name: str, value: Any) -> str:
    """A number of the log as people read it."""
    if name == TOKENS_PER_SECOND:
        return f"{value:,.0f} tokens/s"
    return f"{_SHOWN_AS.get(name, name)} {f'{value:.4g}' if isinstance(value, float) else value}"


def describe_metrics(metrics: dict[str, float]) -> str:
    """An evaluation's loss and accuracy as people read them."""
    parts = [f"loss {metrics['eval_loss']:.4f}"] if "eval_loss" in metrics else []
    if "eval_accuracy" in metrics:
        parts.append(f"accuracy {metrics['eval_accuracy']:.2%}")
    return ", ".join(parts)


def make_console(*, quiet: bool = False) -> Console:
    """The console of a run, on standard output.

    Args:
        quiet: Whether another process of the run speaks.
    """
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL, quiet=quiet)


@contextmanager
def one_voice(console: Console) -> Iterator[None]:
    """While the block runs, let this package's log and all warnings speak in the console, and libraries' bars be still.

    Args:
        console: Where lines go.
    """
    if not torch.cuda.is_available():
        # What DeepSpeed would find out by itself, and announce, as soon as a model is saved.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with ExitStack() as stack, warnings.catch_warnings():
        library: Any = transformers.utils.logging
        if library.is_progress_bar_enabled():
            library.disable_progress_bar()
            stack.callback(library.enable_progress_bar)
        if not console.is_terminal and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        for library in (transformers.utils.logging, datasets.logging) if console.quiet else ():
            stack.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        log, handler = logging.getLogger("slivertune"), _ConsoleHandler(console)
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.INFO)
        stack.callback(log.removeHandler, handler)
        log.addHandler(handler)
        # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 retires, which can't be changed here.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated")
        warnings.showwarning = lambda message, *_, **__: _print(console, f"warning: {message}")
        yield


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "note" if record.levelno < logging.WARNING else record.levelname.lower()
        _print(self._console, f"{prefix}: {record.getMessage()}")


def _print(console: Console, line: str) -> None:
    """Print a line without its secrets.

    A terminal would cut a long line wherever its edge is, a file keeps it whole.
    """
    line = masked(line)
    if console.is_terminal:
        line = "\n".join(wrapped(each, console.width) for each in line.split("\n"))
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def wrapped(line: str, width: int) -> str:
    """A line broken between words, later parts set under the first words; what is longer than a line stays whole.

    Args:
        line: Without line breaks.
        width: Columns of the terminal.
    """
    heading = _HEADING.match(line)
    indent = _INDENT if heading is None else heading.end()
    parts = textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts)
