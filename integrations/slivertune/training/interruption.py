"""Ctrl-C in a run: the first finishes the update and saves a checkpoint, a second ends the run at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, SchedulerType

from slivertune.training.folders import newest_whole
from slivertune.training.ranks.launchers import describe_second_interrupt, is_launched, sends_sigterm
from slivertune.training.ranks.processes import is_on_any_rank

_AGAIN_S = 3.0
"""Seconds in which a repeated signal is the same Ctrl-C, since terminal and launcher both send it."""
_DOING = "asking for Ctrl-C on any rank"


class Interruption(TrainerCallback):
    """Saves a checkpoint after the update in which Ctrl-C came, and then raises KeyboardInterrupt.

    With several ranks, each update costs an all-reduce of one number, so that all ranks save. Add this callback after
    the callback that marks checkpoints as whole.

    Args:
        say: Function that shows a line to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._process: int | None = None
        self._asked_at: float | None = None
        self._is_training = False
        self._is_saving = False
        self._folder = Path()
        self._resumed_from: str | None = None
        self._replaced: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Install the handler of Ctrl-C, unless a shell has this process ignore it."""
        self._is_training = True
        self._folder, self._resumed_from = Path(str(args.output_dir)), args.resume_from_checkpoint
        if threading.current_thread() is not threading.main_thread() or self._process is not None:
            return
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            return
        self._process = os.getpid()
        self._replaced[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
        if sends_sigterm():
            self._replaced[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_terminate)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a checkpoint if Ctrl-C came. Skip a due evaluation unless training depends on it."""
        if not is_on_any_rank(self._asked_at is not None, args.device, _DOING):
            return
        self._save(args, control)
        depends = args.metric_for_best_model is not None or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
        # With `best`, an evaluation would decide again whether to save.
        if not depends or args.save_strategy == SaveStrategy.BEST:
            control.should_evaluate = False

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a checkpoint if Ctrl-C came during an evaluation between two updates."""
        if self._is_training and is_on_any_rank(self._asked_at is not None, args.device, _DOING):
            self._save(args, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End an interrupted run once its checkpoint is whole.

        Raises:
            KeyboardInterrupt: If the checkpoint was saved because of Ctrl-C.
        """
        if self._is_saving:
            raise KeyboardInterrupt

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop answering Ctrl-C with a checkpoint. The work after the last update still finishes."""
        self._is_training = False

    def close(self) -> None:
        """Restore the signal handlers. After a Ctrl-C under a launcher, ignore the signal that it sends again."""
        for number, handler in self._replaced.items():
            signal.signal(number, signal.SIG_IGN if self._asked_at is not None and is_launched() else handler)
        self._replaced.clear()

    def _save(self, args: TrainingArguments, control: TrainerControl) -> None:
        # A run resumed from a checkpoint of the model alone would not give the same bits.
        args.save_only_model = False
        control.should_save = self._is_saving = True

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            return  # a forked data worker, which its parent ends
        if self._asked_at is not None:
            if is_launched() and time.monotonic() < self._asked_at + _AGAIN_S:
                return
            raise KeyboardInterrupt
        self._asked_at = time.monotonic()
        doing = "ending this update and saving a checkpoint" if self._is_training else "evaluating and saving the model"
        # The signal may arrive while another line is printed.
        with suppress(RuntimeError):
            self._say(f"interrupted: {doing}; {describe_second_interrupt()}. {self._describe_kept()}")

    def _describe_kept(self) -> str:
        """Describe the checkpoint that would be left if the process were killed now."""
        checkpoint = newest_whole(self._folder, read_files=False)[0] or self._resumed_from
        state = "no checkpoint is whole" if checkpoint is None else f"{checkpoint} is the last whole checkpoint"
        return f"Until that is done, {state}"

    def _on_terminate(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif self._asked_at is None:
            # The system may deliver the launcher's SIGTERM before the SIGINT of the same Ctrl-C.
            self._on_interrupt(number, frame)
