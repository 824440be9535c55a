"""What a run shows while it goes on: lines above, a progress bar below; lines alone where there is no terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_SUMMARIES = ("train_loss", "eval_runtime")
"""What tells the Trainer's summary of a run, and an evaluation, from an ordinary log."""
_NAMES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}


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
        self._began: float | None = None
        self.seconds = 0.0
        """Time spent in updates, without evaluation and saving."""
        self.num_updates = 0
        """Updates that this took."""

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away; harmless when there is none."""
        self._progress.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the bar."""
        self._task = self._progress.add_task("training", total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to time an update."""
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self.num_updates += 1
        self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print what the Trainer logs."""
        logs: dict[str, Any] = kwargs["logs"]
        if not state.is_local_process_zero or state.max_steps == 0 or any(name in logs for name in _SUMMARIES):
            return
        shown = {name: value for name, value in logs.items() if name != "epoch" and not name.startswith("train_")}
        parts = [f"{_NAMES.get(name, name)} {_number(value)}" for name, value in shown.items()]
        self.say(f"step {state.global_step:>4}/{state.max_steps}  {'  '.join(parts)}")

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
            self._evaluation = self._progress.add_task("evaluating", total=total)
        self._progress.advance(self._evaluation)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the bar away."""
        self.close()


def make_progress(console: Console, *, enabled: bool = True) -> Progress:
    """A progress bar with counts and times."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
    )


def describe_metrics(metrics: dict[str, float]) -> str:
    """An evaluation's loss and accuracy as people read them."""
    parts = [f"loss {metrics['eval_loss']:.4f}"] if "eval_loss" in metrics else []
    if "eval_accuracy" in metrics:
        parts.append(f"accuracy {metrics['eval_accuracy']:.2%}")
    return ", ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
