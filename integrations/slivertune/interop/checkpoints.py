"""What a Trainer's checkpoints carry beside what the Trainer itself writes and reads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from slivertune import aside
from slivertune.hift import HiFT
from slivertune.parallel.beside import FOLDER as HIFT_FOLDER
from slivertune.parallel.beside import load_hift, save_hift
from slivertune.parallel.sparse_beside import FOLDER as SFT_FOLDER
from slivertune.parallel.sparse_beside import load_sft, save_sft
from slivertune.sft import SFT
from slivertune.tokentune import TokenTuneHandle

TOKENS_NAME = "slivertune_tokens.json"
"""The file of a checkpoint that says which selection of tokens comes next."""


class ResumeListener:
    """Knows which checkpoint a Trainer's `train` was asked to continue from; callbacks are not told.

    Args:
        trainer: Its `train` is listened to, on this instance alone.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.checkpoint: Path | None = None
        """What the run under way continues from."""
        train: Callable[..., Any] = trainer.train

        @wraps(train)
        def listen(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            self.checkpoint = _find_checkpoint(trainer.args, resume_from_checkpoint)
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = listen  # type: ignore[method-assign]


def _find_checkpoint(training: TrainingArguments, asked: str | bool | None) -> Path | None:
    if asked is True:
        last = get_last_checkpoint(training.output_dir)  # type: ignore[no-untyped-call]
        return None if last is None else Path(last)
    return Path(asked) if asked else None


def checkpoint_folder(training: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer has just saved a checkpoint.

    Args:
        training: Its arguments.
        state: Its state.

    Raises:
        RuntimeError: If it has saved elsewhere.
    """
    folder = Path(str(training.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.is_world_process_zero and not folder.is_dir():
        raise RuntimeError(
            f"the Trainer has not saved its checkpoint in {folder}, so what belongs to it can't be kept there; "
            "hyperparameter_search, which gives every trial a folder, does not go with slivertune.attach"
        )
    return folder


class KeepTokens(TrainerCallback):
    """Writes a token selection's place in its draws into every checkpoint, and finds it again.

    Args:
        handle: The selection in use.
        listener: Knows the checkpoint that a run continues from.
    """

    def __init__(self, handle: Callable[[], TokenTuneHandle], listener: ResumeListener) -> None:
        self._handle = handle
        self._listener = listener

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue the draws of the run that is resumed.

        Raises:
            ValueError: If that was of another seed.
        """
        handle, checkpoint = self._handle(), self._listener.checkpoint
        if checkpoint is None:
            return
        path = checkpoint / TOKENS_NAME
        if path.is_file():
            handle.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
            return
        warnings.warn(
            f"{checkpoint} was saved without a selection of tokens ({TOKENS_NAME}); its draws begin anew",
            UserWarning,
            stacklevel=2,
        )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved."""
        if state.is_world_process_zero:
            aside.write_json(checkpoint_folder(args, state) / TOKENS_NAME, self._handle().state_dict())


class KeepHiFT(TrainerCallback):
    """Writes HiFT's state into every checkpoint where several ranks train, and reads it on any number of them.

    On one process it is in the Trainer's own file. On several the Trainer would load all of it onto each GPU.

    Args:
        optimizer: The optimizer in use.
        listener: Knows the checkpoint that a run continues from.
    """

    def __init__(self, optimizer: Callable[[], HiFT], listener: ResumeListener) -> None:
        self._optimizer = optimizer
        self._listener = listener

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue from the state of the run that is resumed."""
        checkpoint = self._listener.checkpoint
        if checkpoint is not None and (checkpoint / HIFT_FOLDER).is_dir():
            load_hift(self._optimizer(), checkpoint / HIFT_FOLDER)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved. A collective."""
        optimizer = self._optimizer()
        if optimizer.keeps_beside and not args.save_only_model:
            save_hift(optimizer, checkpoint_folder(args, state) / HIFT_FOLDER)


class KeepSFT(TrainerCallback):
    """Writes SFT's state into checkpoints of sharded models, and refuses weights without their deltas.

    Args:
        optimizer: The optimizer in use.
        listener: Knows the checkpoint that a run continues from.
    """

    def __init__(self, optimizer: Callable[[], SFT], listener: ResumeListener) -> None:
        self._optimizer = optimizer
        self._listener = listener

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue from the state of the run that is resumed.

        Raises:
            RuntimeError: If it is not in the checkpoint.
        """
        optimizer, checkpoint = self._optimizer(), self._listener.checkpoint
        if checkpoint is not None and (checkpoint / SFT_FOLDER).is_dir():
            load_sft(optimizer, checkpoint / SFT_FOLDER)
        if state.global_step and not optimizer.updates:
            raise RuntimeError(
                f"the checkpoint after {state.global_step} updates has no optimizer state, so its deltas can't be told "
                "from pretrained weights; resume from one that was saved without save_only_model, or start anew"
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved. A collective."""
        optimizer = self._optimizer()
        if optimizer.shows_card and not args.save_only_model:
            save_sft(optimizer, checkpoint_folder(args, state) / SFT_FOLDER)
