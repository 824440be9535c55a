"""Additional content of a Trainer's checkpoints, beside the files that the Trainer itself writes and reads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from slivertune.core import atomic
from slivertune.core.manifest import MANIFEST_NAME
from slivertune.core.saved_state import load_dictionary
from slivertune.core.sliver import Sliver
from slivertune.core.transformers_internals import reading_by, wrap_epoch
from slivertune.parallel.checkpoint.manifests import check_together, write_together
from slivertune.parallel.checkpoint.sharded_weights import check_form, holds_sharded_weights, load_sharded_weights
from slivertune.parallel.checkpoint.sidecar import read_state, save_state
from slivertune.parallel.consistency.explain import compare_now
from slivertune.parallel.layout import layout_of
from slivertune.tokentune import TokenTuneHandle

if TYPE_CHECKING:
    from slivertune.interop.trainer import Attachment

TOKENS_NAME = "slivertune_tokens.json"
"""Name of the checkpoint file with the position in the random draws of the token selection."""
# State files of one process and of DeepSpeed. DDP and FSDP2 keep HiFT's state in its own folder.
_STATE_PATTERNS = ("optimizer.pt", "optimizer.bin", "global_step*")


def load_tokens(handle: TokenTuneHandle, path: Path) -> None:
    """Continue the random draws that a checkpoint's file records.

    Args:
        handle: The token selection in use.
        path: The file.

    Raises:
        ValueError: If the file is damaged, or of another seed; names the file.
    """
    try:
        handle.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def resuming(trainer: Trainer, asked: str | bool | None, *, needs_manifest: bool) -> Iterator[Path | None]:
    """Check the checkpoint that `train` was asked to continue from, and let the Trainer read it in the block.

    Checkpoints of FSDP2's ranks can be read even if no rank holds a shard.

    Args:
        trainer: The Trainer; its methods that read a checkpoint are overridden on this instance.
        asked: Argument of `train`.
        needs_manifest: Whether a checkpoint without a manifest is refused; with only TokenTune, it is accepted.

    Yields:
        The checkpoint; None if training begins at the start.

    Raises:
        DamagedCheckpointError: If the checkpoint is incomplete.
        ValueError: If this layout can't read the form of the checkpoint.
    """
    found = get_last_checkpoint(trainer.args.output_dir) if asked is True else asked  # type: ignore[no-untyped-call]
    checkpoint = Path(found) if found else None
    if checkpoint is not None and (needs_manifest or (checkpoint / MANIFEST_NAME).is_file()):
        check_together(checkpoint)
    layout = layout_of(trainer.accelerator)
    if checkpoint is not None and needs_manifest:
        check_form(checkpoint, layout)
    if (
        checkpoint is None
        or not needs_manifest
        or layout not in ("single", "ddp")
        or not holds_sharded_weights(checkpoint)
    ):
        yield checkpoint
        return

    own: Any = trainer

    def load_weights(folder: str, model: Any = None) -> None:
        load_sharded_weights(own.model if model is None else model, folder)

    def load_schedule(folder: str | None) -> None:
        # FSDP2's optimizer file holds only a placeholder, in a form of its own.
        if folder is not None:
            own.lr_scheduler.load_state_dict(load_dictionary(Path(folder) / "scheduler.pt"))

    with reading_by(trainer, weights=load_weights, optimizer_and_schedule=load_schedule):
        yield checkpoint


def stop_at_the_end(trainer: Trainer) -> None:
    """Let a run that resumes from its last checkpoint make no further update. The Trainer itself would make one.

    Args:
        trainer: The Trainer; its method that runs an epoch is overridden on this instance.
    """

    def wrap(run_epoch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run_epoch)
        def run_what_is_left(*args: Any, **kwargs: Any) -> Any:
            if 0 < trainer.state.max_steps <= trainer.state.global_step:
                trainer.control.should_training_stop = True
                return None
            return run_epoch(*args, **kwargs)

        return run_what_is_left

    wrap_epoch(trainer, wrap)


class KeepManifest(TrainerCallback):
    """Writes a checkpoint's manifest once all its files are written. Must be the last of our callbacks."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved. A collective."""
        write_together(checkpoint_folder(args, state), {"global_step": state.global_step})


def checkpoint_folder(training: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint that the Trainer has just saved.

    Args:
        training: The Trainer's arguments.
        state: The Trainer's state.

    Raises:
        RuntimeError: If the Trainer has saved elsewhere.
    """
    folder = Path(str(training.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.is_world_process_zero and not folder.is_dir():
        raise RuntimeError(
            f"the Trainer has not saved its checkpoint in {folder}, so slivertune's state can't be saved there. "
            "Leave out hyperparameter_search: it gives every trial a folder, and does not go with slivertune.attach"
        )
    return folder


def keep_manifest_last(trainer: Trainer, callback: KeepManifest) -> None:
    """Let a callback write the manifests of a Trainer's checkpoints, after all callbacks that it has so far.

    Args:
        trainer: The Trainer; an earlier `KeepManifest` is removed.
        callback: The callback that writes them from now on.
    """
    trainer.remove_callback(KeepManifest)
    trainer.add_callback(callback)


def holds_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint has an optimizer's state in a form that the Trainer itself loads.

    Args:
        checkpoint: A Trainer's checkpoint.
    """
    return any(next(checkpoint.glob(pattern), None) is not None for pattern in _STATE_PATTERNS)


def load_state(optimizer: Sliver, checkpoint: Path) -> None:
    """Load an optimizer's state from a checkpoint whose model the Trainer has just loaded.

    DeepSpeed has loaded both.

    Args:
        optimizer: HiFT or SFT.
        checkpoint: A checkpoint of this training.

    Raises:
        ValueError: If the state is missing, damaged, or of another run.
    """
    folder, file = checkpoint / optimizer.method, checkpoint / "optimizer.pt"
    if folder.is_dir():
        read_state(optimizer, folder)
    elif next(checkpoint.glob("global_step*"), None) is None:
        optimizer.load_state_dict(load_dictionary(file))


class KeepState(TrainerCallback):
    """Writes the state of HiFT or SFT into every checkpoint that needs a sidecar, and refuses weights without it.

    On one process the Trainer's own file has the state. On several ranks the Trainer would load all of it onto each
    GPU, or split it. On these, every checkpoint and the end of training also compare the ranks.

    Args:
        attachment: Result of `attach`; has the optimizer, and the checkpoint that a run continues from.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue from the state of the resumed run.

        Raises:
            RuntimeError: If the checkpoint has no state.
        """
        optimizer, checkpoint = self._attachment.optimizer, self._attachment.checkpoint
        if checkpoint is None:
            return
        if (checkpoint / optimizer.method).is_dir():
            read_state(optimizer, checkpoint / optimizer.method)
        elif not holds_state(checkpoint):
            raise RuntimeError(
                f"{checkpoint} has no optimizer state, so {optimizer.without_state}. Resume from one that was saved "
                "without save_only_model, or start a new run from its weights "
                f"(from_pretrained({str(checkpoint)!r}))"
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved, and compare the ranks. A collective."""
        optimizer = self._attachment.optimizer
        if optimizer.uses_sidecar and not args.save_only_model:
            save_state(optimizer, checkpoint_folder(args, state) / optimizer.method)
        compare_now(self._attachment.trainer.accelerator)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Complete the best model, and compare the ranks. A collective."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._attachment.load_best(Path(state.best_model_checkpoint))
        compare_now(self._attachment.trainer.accelerator)


class KeepTokens(TrainerCallback):
    """Writes the position in a token selection's draws into every checkpoint, and restores it.

    Args:
        attachment: Result of `attach`; has the selection, and the checkpoint that a run continues from.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue the draws of the resumed run.

        Raises:
            ValueError: If that run had another seed.
        """
        self._attachment.put_on_tokens()  # a subclass may begin a training past `train`
        tokens, checkpoint = self._attachment.current_tokens(), self._attachment.checkpoint
        if checkpoint is not None and (checkpoint / TOKENS_NAME).is_file():
            load_tokens(tokens, checkpoint / TOKENS_NAME)
        elif checkpoint is not None:
            warnings.warn(
                f"{checkpoint} was saved without a selection of tokens ({TOKENS_NAME}), so its draws start again",
                UserWarning,
                stacklevel=2,
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved."""
        if state.is_world_process_zero:
            atomic.write_json(
                checkpoint_folder(args, state) / TOKENS_NAME, self._attachment.current_tokens().state_dict()
            )
