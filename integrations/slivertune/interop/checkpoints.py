"""What a Trainer's checkpoints carry beside what the Trainer itself writes and reads."""

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
"""The file of a checkpoint that says which selection of tokens comes next."""
# Of one process; of DeepSpeed. What DDP and FSDP2 keep of HiFT has a folder of its own.
_STATE_PATTERNS = ("optimizer.pt", "optimizer.bin", "global_step*")


def load_tokens(handle: TokenTuneHandle, path: Path) -> None:
    """Continue the draws that a checkpoint's file records.

    Args:
        handle: The selection in use.
        path: The file.

    Raises:
        ValueError: If it is damaged, or of another seed; names the file.
    """
    try:
        handle.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def resuming(trainer: Trainer, asked: str | bool | None, *, needs_manifest: bool) -> Iterator[Path | None]:
    """Inside, a Trainer trains from the checkpoint that its `train` was asked to continue from, which is whole.

    It takes what ranks under FSDP2 have saved also where no rank holds a shard.

    Args:
        trainer: How it reads a checkpoint is overridden, on this instance.
        asked: As `train` takes it.
        needs_manifest: Whether a checkpoint without a manifest is refused; TokenTune alone takes those of any Trainer.

    Yields:
        The checkpoint; None where training begins at the start.

    Raises:
        DamagedCheckpointError: If the checkpoint is not whole.
        ValueError: If it was saved in a form that this layout does not read.
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
        # What FSDP2 keeps of the optimizer is a placeholder, in a form of its own.
        if folder is not None:
            own.lr_scheduler.load_state_dict(load_dictionary(Path(folder) / "scheduler.pt"))

    with reading_by(trainer, weights=load_weights, optimizer_and_schedule=load_schedule):
        yield checkpoint


def stop_at_the_end(trainer: Trainer) -> None:
    """Let a run that is resumed from its very last checkpoint make no further update; the Trainer itself makes one.

    Args:
        trainer: The method that runs an epoch is overridden, on this instance.
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
    """Writes a checkpoint's manifest when all that belongs to it has been written. The last callback of ours."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved. A collective."""
        write_together(checkpoint_folder(args, state), {"global_step": state.global_step})


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


def keep_manifest_last(trainer: Trainer, callback: KeepManifest) -> None:
    """Let a callback write the manifests of a Trainer's checkpoints, after all callbacks that it has so far.

    Args:
        trainer: The one that wrote them before writes none any more.
        callback: The one that does from now on.
    """
    trainer.remove_callback(KeepManifest)
    trainer.add_callback(callback)


def holds_state(checkpoint: Path) -> bool:
    """Whether an optimizer's state is in a checkpoint, in a form that the Trainer itself loads.

    Args:
        checkpoint: A Trainer's.
    """
    return any(next(checkpoint.glob(pattern), None) is not None for pattern in _STATE_PATTERNS)


def load_state(optimizer: Sliver, checkpoint: Path) -> None:
    """Load an optimizer's state from a checkpoint whose model the Trainer has just loaded; DeepSpeed has done both.

    Args:
        optimizer: HiFT or SFT.
        checkpoint: Of this training.

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

    On one process it is in the Trainer's own file. On several the Trainer would load all of it onto each GPU, or cut it
    up; there it compares what all ranks must have alike at every checkpoint and at the end of the training.

    Args:
        attachment: What `attach` returns; it has the optimizer, and the checkpoint that a run continues from.
    """

    def __init__(self, attachment: "Attachment") -> None:
        self._attachment = attachment

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue from the state of the run that is resumed.

        Raises:
            RuntimeError: If it is not in the checkpoint.
        """
        optimizer, checkpoint = self._attachment.optimizer, self._attachment.checkpoint
        if checkpoint is None:
            return
        if (checkpoint / optimizer.method).is_dir():
            read_state(optimizer, checkpoint / optimizer.method)
        elif not holds_state(checkpoint):
            raise RuntimeError(
                f"{checkpoint} has no optimizer state, so {optimizer.without_state}; resume from one that was saved "
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
    """Writes a token selection's place in its draws into every checkpoint, and finds it again.

    Args:
        attachment: What `attach` returns; it has the selection, and the checkpoint that a run continues from.
    """

    def __init__(self, attachment: "Attachment") -> None:
        self._attachment = attachment

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue the draws of the run that is resumed.

        Raises:
            ValueError: If that was of another seed.
        """
        tokens, checkpoint = self._attachment.current_tokens(), self._attachment.checkpoint
        if checkpoint is not None and (checkpoint / TOKENS_NAME).is_file():
            load_tokens(tokens, checkpoint / TOKENS_NAME)
        elif checkpoint is not None:
            warnings.warn(
                f"{checkpoint} was saved without a selection of tokens ({TOKENS_NAME}); its draws start again",
                UserWarning,
                stacklevel=2,
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved."""
        if state.is_world_process_zero:
            atomic.write_json(
                checkpoint_folder(args, state) / TOKENS_NAME, self._attachment.current_tokens().state_dict()
            )
