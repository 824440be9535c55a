"""Display of a run: lines above a progress bar, or only lines if there is no terminal.

The run's own lines and all warnings are shown, but not the progress bars of libraries.
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
"""Keys that tell the Trainer's summary of a run, and an evaluation, from an ordinary log."""
_WIDTH_WITHOUT_TERMINAL = 120
_SHOWN_AS = {"grad_norm": "gradient norm", "learning_rate": "rate"}
_NOT_SHOWN = ("epoch", "skipped_updates")
_HEADING = re.compile(r" {2}\S+ +")
"""Beginning of a line in the table that opens a run: `  model   `."""
_INDENT = 4


class Display(TrainerCallback):
    """Replaces the Trainer's own progress bar and printed dictionaries.

    Args:
        console: Console to write to.
        bar: Whether to draw the bar. The lines are printed in any case.
    """

    def __init__(self, console: Console, *, bar: bool = True) -> None:
        self._console = console
        self._progress = make_progress(console, enabled=bar)
        self._task: Any = None
        self._evaluation: Any = None
        self.before_training: Callable[[], None] | None = None
        """Callback before the first update, when the model has its layout and the bar is not drawn yet."""

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        _print(self._console, line)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        self._progress.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the bar, after the callback before training."""
        if self.before_training is not None:
            self.before_training()
        self._task = self._progress.add_task("training", total=state.max_steps, completed=state.global_step, status="")
        self._progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print the values that the Trainer logs."""
        logs: dict[str, Any] = kwargs["logs"]
        if not state.is_local_process_zero or state.max_steps == 0 or any(name in logs for name in _SUMMARIES):
            return
        # Names with a slash are for trackers.
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
        """Remove the evaluation's bar, and print the metrics of an evaluation during training."""
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
        """Advance the evaluation's bar."""
        if self._evaluation is None:
            loader: Any = kwargs.get("eval_dataloader")
            total = len(loader) if hasattr(loader, "__len__") else None
            self._evaluation = self._progress.add_task("evaluating", total=total, status="")
        self._progress.advance(self._evaluation)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the bar."""
        self.close()


def make_progress(console: Console, *, enabled: bool = True) -> Progress:
    """Make a progress bar with counts, times and a task's field `status`, as wide as the console."""
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
    """Format a number of the log for people."""
    if name == TOKENS_PER_SECOND:
        return f"{value:,.0f} tokens/s"
    return f"{_SHOWN_AS.get(name, name)} {f'{value:.4g}' if isinstance(value, float) else value}"


def describe_metrics(metrics: dict[str, float]) -> str:
    """Format an evaluation's loss and accuracy for people."""
    parts = [f"loss {metrics['eval_loss']:.4f}"] if "eval_loss" in metrics else []
    if "eval_accuracy" in metrics:
        parts.append(f"accuracy {metrics['eval_accuracy']:.2%}")
    return ", ".join(parts)


def make_console(*, quiet: bool = False) -> Console:
    """Make the console of a run, on standard output.

    Args:
        quiet: Whether to print nothing, since another process of the run prints.
    """
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL, quiet=quiet)


@contextmanager
def one_voice(console: Console) -> Iterator[None]:
    """Show this package's log and all warnings in the console, and silence libraries' bars, while the block runs.

    Args:
        console: Console to write to.
    """
    if not torch.cuda.is_available():
        # DeepSpeed would detect this by itself, and announce it, as soon as a model is saved.
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

    A terminal would break a long line at its edge, so the line is wrapped there; a file keeps it whole.
    """
    line = masked(line)
    if console.is_terminal:
        line = "\n".join(wrapped(each, console.width) for each in line.split("\n"))
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def wrapped(line: str, width: int) -> str:
    """Wrap a line between words, with later parts indented to the first words. Words longer than a line stay whole.

    Args:
        line: Text without line breaks.
        width: Columns of the terminal.
    """
    heading = _HEADING.match(line)
    indent = _INDENT if heading is None else heading.end()
    parts = textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts)
