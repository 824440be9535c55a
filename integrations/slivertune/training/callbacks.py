"""Callbacks for a run of the stock Trainer: whole checkpoints, and a guard against non-finite updates."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer import TRAINER_STATE_NAME

from slivertune.core.manifest import find_damage, remove_manifest
from slivertune.core.sliver import Sliver
from slivertune.interop.checkpoints import KeepManifest, checkpoint_folder
from slivertune.parallel.checkpoint.manifests import write_together
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.training.folders import checkpoint_folders, checkpoint_step, remove_old
from slivertune.training.ranks.processes import are_on_any_rank

_LOSS = "the loss"


class CheckpointMarker(KeepManifest):
    """Writes a Trainer checkpoint's manifest as its last file, and deletes old checkpoints only after that.

    The Trainer deletes old checkpoints before it reports a save. Its own limit (`TrainingArguments.save_total_limit`)
    must be off: between its deletion and our manifest, no whole checkpoint might be left. Add this callback after all
    callbacks that write into checkpoints.

    Args:
        facts: Plain JSON for a resumed run.
        save_total_limit: Checkpoints to keep; None keeps all. The newest whole one and the best one are always kept.
    """

    def __init__(self, facts: dict[str, Any], save_total_limit: int | None = None) -> None:
        self._facts = facts
        self._save_total_limit = save_total_limit

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the best checkpoint in a moved folder, and remove manifests of damaged ones that this run overwrites."""
        if args.save_total_limit is not None:
            raise RuntimeError(
                f"TrainingArguments.save_total_limit={args.save_total_limit} deletes before a checkpoint is marked. "
                "Set it to None and give the limit to CheckpointMarker"
            )
        _follow_best(args, state)
        if state.is_world_process_zero:
            for folder in checkpoint_folders(Path(str(args.output_dir))):
                if checkpoint_step(folder) > state.global_step and find_damage(folder) is not None:
                    remove_manifest(folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the manifest of the checkpoint just saved, and delete checkpoints beyond the limit. A collective."""
        # Ctrl-C saves all, whatever the run saves otherwise.
        facts = {**self._facts, "save_only_model": True} if args.save_only_model else self._facts
        write_together(checkpoint_folder(args, state), {"global_step": state.global_step, "facts": facts})
        if state.is_world_process_zero and self._save_total_limit is not None:
            best = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)
            remove_old(Path(str(args.output_dir)), self._save_total_limit, best)


def _follow_best(args: TrainingArguments, state: TrainerState) -> None:
    """Let a resumed run whose folder was moved find its best checkpoint.

    Raises:
        ValueError: If it is to be loaded at the end, and is gone.
    """
    saved = Path(str(args.resume_from_checkpoint)) / TRAINER_STATE_NAME
    best = TrainerState.load_from_json(str(saved)).best_model_checkpoint if saved.is_file() else None
    if best is None or Path(best).is_dir():
        return
    moved = Path(str(args.output_dir)) / Path(best).name
    if moved.is_dir():
        state.best_model_checkpoint = str(moved)
    elif args.load_best_model_at_end:
        raise ValueError(
            f"{best}, the best checkpoint so far, is gone, and is to be loaded at the end. Put it back, or resume with "
            "--load_best_model_at_end false"
        )


class NonFiniteGuard(TrainerCallback):
    """Skips an update whose loss or gradient is not finite, with a message, and ends the run after too many in a row.

    If training ends and no update was applied, that is an error, too: the model would be unchanged.

    Each update costs the norm of the existing gradients, one synchronisation with the device, and, with several ranks,
    an all-reduce of two numbers, so that all ranks skip or none. A skipped update still counts as a step of the Trainer
    and its schedule. The optimizer keeps its state, and HiFT its group. Under fp16 autocast, gradients overflow by
    design and the scaler skips those updates, so only the loss is judged. DeepSpeed has applied the update before the
    Trainer calls its callbacks, so there the first non-finite update ends the run. Losses are judged after `watch`.

    Args:
        limit: Non-finite updates in a row after which training stops.
        say: Function that shows a line to the user.
        stops: Whether updates are made inside the backward and can't be skipped. A non-finite loss then stops the run
            before its backward, and gradients and their norm are never judged.
    """

    def __init__(self, limit: int, say: Callable[[str], None], *, stops: bool = False) -> None:
        self.can_skip = True
        """Whether updates are applied after the Trainer calls its callbacks. It is false under DeepSpeed."""
        self._limit = limit
        self._stops = stops
        self._say = say
        self._num_in_a_row = 0
        self._losses: list[torch.Tensor] = []
        self._lacks_loss = False
        """Whether an update since the last log line had a non-finite loss."""
        self.num_skipped = 0
        """Updates skipped so far."""
        self._first_step, self._first_skipped = 0, 0
        """Number of updates, and of skipped ones, when this training began. A resumed run starts above 0."""
        self._is_due, self._has_applied = False, False
        """Whether the next step has gradients to apply, and whether this training has applied an update."""
        self._has_rate, self._lacked_rate = True, False
        """Whether the next step has a learning rate above 0, and whether a step was no update for lack of one."""
        self._updates_before: int | None = None
        """Updates that this library's optimizer had applied before this training. None for another optimizer."""

    def metrics(self) -> dict[str, float]:
        """Return this guard's values for the next log line.

        The Trainer replaces a non-finite loss by the mean of earlier losses, or by 0 if there are none. For such a
        line, this guard logs NaN instead, which is the true mean of its losses.
        """
        lacks_loss, self._lacks_loss = self._lacks_loss, False
        return {"skipped_updates": self.num_skipped, **({"loss": math.nan} if lacks_loss else {})}

    def watch(self, trainer: Trainer) -> None:
        """Record every loss that a Trainer trains on, from the model or a loss function, on this instance alone.

        Args:
            trainer: Trainer that has not trained yet.
        """
        compute_loss = trainer.compute_loss

        @wraps(compute_loss)
        def watched(*args: Any, **kwargs: Any) -> Any:
            computed = compute_loss(*args, **kwargs)
            loss = computed[0] if isinstance(computed, tuple) else computed
            if loss.requires_grad:
                if self._stops:
                    _stop_unless_finite(loss.detach())
                self._losses.append(loss.detach())
            return computed

        trainer.compute_loss = watched  # type: ignore[method-assign]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reset the record of applied updates."""
        self._first_step, self._first_skipped, self._has_applied = state.global_step, self.num_skipped, False
        self._updates_before, self._lacked_rate = _updates_of(kwargs.get("optimizer")), False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record whether the schedule has a rate for the next step, unless a rate of 0 is requested."""
        self._has_rate = True
        if args.learning_rate:
            with suppress(AssertionError):  # some of DeepSpeed's schedules have no rate before their first step
                self._has_rate = any(rate > 0 for rate in kwargs["lr_scheduler"].get_last_lr())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge the losses and gradients of the next update. It is called after clipping.

        Raises:
            RuntimeError: If `limit` updates in a row were not finite, or DeepSpeed has applied such an update already.
        """
        model: nn.Module = kwargs["model"]
        own = self._find(model, judge_gradients=not args.fp16)
        found, lacks_loss = _on_any_rank(own, args.device)
        self._losses.clear()
        # DeepSpeed, and a step in the backward, leave no gradients.
        self._is_due = not self.can_skip or self._stops or any(each.grad is not None for each in model.parameters())
        if found is None:
            self._num_in_a_row = 0
            return
        self._is_due = False
        self._lacks_loss |= lacks_loss
        if not self.can_skip:
            raise RuntimeError(
                f"step {state.global_step + 1}: {found}, and DeepSpeed has made that update already. Resume from the "
                "last checkpoint with a lower --learning_rate or --max_grad_norm, or look for broken rows"
            )
        model.zero_grad()
        self.num_skipped += 1
        self._num_in_a_row += 1
        step = state.global_step + 1
        self._say(f"step {step}: {found}; this update is skipped ({self.num_skipped} so far)")
        if self._num_in_a_row >= self._limit:
            raise RuntimeError(
                f"{self._num_in_a_row} updates in a row were not finite, the last at step {step} ({found}). Lower "
                "--learning_rate or --max_grad_norm, look for broken rows, or raise --non_finite_limit"
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record whether the update was applied: not skipped here, by a loss scale, or for lack of gradients or a rate.

        HiFT may apply the rate that it has held since its cycle began.
        """
        updates = _updates_of(kwargs["optimizer"])
        if updates is not None:
            self._is_due = updates > (self._updates_before or 0)
        is_stepped = self._is_due and not getattr(kwargs["optimizer"], "step_was_skipped", False)
        has_rate = self._has_rate or bool(updates and _own(kwargs["optimizer"]).applied_lr)
        self._has_applied |= is_stepped and has_rate
        self._lacked_rate |= is_stepped and not has_rate

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise an error if training changed nothing. In a resumed run, only warn.

        Raises:
            RuntimeError: If a run that was not resumed has made updates, and none was applied.
        """
        num_updates, num_skipped = state.global_step - self._first_step, self.num_skipped - self._first_skipped
        if not num_updates or self._has_applied:
            return
        message = f"none of the {num_updates} updates since step {self._first_step} was applied"
        if num_skipped == num_updates:
            message += ", since their losses or gradients were not finite"
        elif self._lacked_rate:
            message += ", since the learning rate was 0 in each"
        elif args.fp16:
            message += ", since their gradients overflowed under fp16, whose loss scale falls for some updates"
        else:
            message += ", since no gradient reached the trained weights"
        if self._first_step:
            self._say(f"warning: {message}; the model is that of the checkpoint")
            return
        raise RuntimeError(
            f"{message}. The model is unchanged. Lower "
            + (
                "--warmup_steps, or use more updates"
                if self._lacked_rate
                else "--learning_rate or --max_grad_norm, look for broken rows, use more updates or bf16, or check "
                "that the loss depends on the trained weights"
            )
        )

    def _find(self, model: nn.Module, *, judge_gradients: bool) -> str | None:
        """Describe the first value that is not finite. Return None if all are."""
        signs = [(_LOSS, loss.float().sum()) for loss in self._losses]
        gradients = [each.grad for each in model.parameters() if judge_gradients and each.grad is not None]
        if gradients:
            norm: Any = torch.nn.utils.get_total_norm(gradients)
            # The norm of sharded gradients is sharded, too.
            if hasattr(norm, "full_tensor"):
                with guard("adding up the norm of the gradients", computes=True):
                    norm = norm.full_tensor()
            signs.append(("the gradient norm", norm.float()))
        if not signs:
            return None
        values = torch.stack([sign.to(signs[-1][1].device) for _, sign in signs]).tolist()
        for (name, _), value in zip(signs, values, strict=True):
            if not math.isfinite(value):
                return f"{name} is {value}"
        return None


def _stop_unless_finite(loss: torch.Tensor) -> None:
    """Raise an error, on all ranks, if a loss is not finite on one of them. A collective."""
    is_finite = bool(loss.isfinite().all())
    (stops,) = are_on_any_rank([not is_finite], loss.device, "looking for losses that are not finite")
    if stops:
        found = "the loss of another rank is not finite" if is_finite else f"the loss is {loss.float().sum().item()}"
        raise RuntimeError(
            f"{found}, and --gradients stepped can't skip an update. Lower --learning_rate, look for broken rows, or "
            "use --gradients host"
        )


def _updates_of(optimizer: Any) -> int | None:
    """Return the number of updates that this library's optimizer has applied, or None for any other, or none."""
    inner = _own(optimizer)
    return inner.updates if isinstance(inner, Sliver) else None


def _own(optimizer: Any) -> Any:
    """Return the optimizer in accelerate's wrapper, or itself."""
    return getattr(optimizer, "optimizer", optimizer)


def keep_events_in(trainer: Trainer, folder: Path) -> None:
    """Write TensorBoard's files to one place in a run's folder, also when the run is resumed.

    TensorBoard's callback chooses its folder when training begins. An earlier log line, such as that of the first
    evaluation, would send the files of the whole run to a folder of the working directory.

    Args:
        trainer: Trainer that has not logged yet.
        folder: Folder of the run; files go to `tensorboard` in it, unless TENSORBOARD_LOGGING_DIR names another place.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = str(folder / "tensorboard")


def _on_any_rank(found: str | None, device: torch.device) -> tuple[str | None, bool]:
    """Return this rank's finding, else a note of another rank's, and whether any rank's loss is not finite."""
    flags = [found is not None, found is not None and found.startswith(_LOSS)]
    is_found, lacks_loss = are_on_any_rank(flags, device, "looking for losses that are not finite")
    if found is None and is_found:
        found = "a loss or gradient of another rank is not finite"
    return found, lacks_loss
