"""What watches a run of the stock Trainer: whole checkpoints, and losses or gradients that are not finite."""

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from slivertune.core.manifest import find_damage, remove_manifest
from slivertune.core.sliver import Sliver
from slivertune.interop.checkpoints import KeepManifest, checkpoint_folder
from slivertune.parallel.checkpoint.manifests import write_together
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.training.output.folders import checkpoint_folders, checkpoint_step, remove_old
from slivertune.training.ranks.processes import are_on_any_rank

_LOSS = "the loss"


class CheckpointMarker(KeepManifest):
    """Writes a Trainer checkpoint's manifest, last of all, and only then deletes old ones.

    The Trainer itself deletes before it says that it has saved, so its own limit (`TrainingArguments.save_total_limit`)
    must be off: between its deletion and our marker nothing whole would be left. Add it after all callbacks that write
    into checkpoints.

    Args:
        facts: What a resumed run should know; plain JSON.
        save_total_limit: Checkpoints to keep; None keeps all. The newest whole one and the best one always stay.
    """

    def __init__(self, facts: dict[str, Any], save_total_limit: int | None = None) -> None:
        self._facts = facts
        self._save_total_limit = save_total_limit

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Unmark damaged checkpoints that this run will write over."""
        if args.save_total_limit is not None:
            raise RuntimeError(
                f"TrainingArguments.save_total_limit={args.save_total_limit} deletes before a checkpoint is marked; "
                "set it to None and give the limit to CheckpointMarker"
            )
        if state.is_world_process_zero:
            for folder in checkpoint_folders(Path(str(args.output_dir))):
                if checkpoint_step(folder) > state.global_step and find_damage(folder) is not None:
                    remove_manifest(folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete and mark the checkpoint that was just saved, and delete those beyond the limit. A collective."""
        write_together(checkpoint_folder(args, state), {"global_step": state.global_step, "facts": self._facts})
        if state.is_world_process_zero and self._save_total_limit is not None:
            best = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)
            remove_old(Path(str(args.output_dir)), self._save_total_limit, best)


class NonFiniteGuard(TrainerCallback):
    """Skips an update whose loss or gradient is not finite, says so, and gives up after too many in a row.

    A training that ends without any update applied is an error, too: the model would be the one that it began with.

    Costs one norm of the gradients that exist and one synchronisation with the device an update, and one number's
    all-reduce where there are several ranks: all skip, or none. A skipped update still counts as a step of the Trainer
    and of its schedule; the optimizer keeps its state, and HiFT its group. Under fp16 autocast gradients overflow by
    design and the scaler skips those updates itself: only the loss is judged there. DeepSpeed has made the update by
    the time that a Trainer asks its callbacks, so there the first one ends the run. It sees losses once it watches the
    Trainer.

    Args:
        limit: Updates in a row after which training stops.
        say: Shows a line to the user.
        stops: Whether an update can't be skipped, since it is made inside the backward: a loss that is not finite
            stops the run before its backward. Gradients, and so their norm, are never seen then.
    """

    def __init__(self, limit: int, say: Callable[[str], None], *, stops: bool = False) -> None:
        self.can_skip = True
        """Whether updates are made after the Trainer has asked."""
        self._limit = limit
        self._stops = stops
        self._say = say
        self._num_in_a_row = 0
        self._losses: list[torch.Tensor] = []
        self._lacks_loss = False
        """Whether an update since the last line of the log had a loss that was not finite."""
        self.num_skipped = 0
        """Updates that were skipped so far."""
        self._first_step, self._first_skipped = 0, 0
        """Updates, and skipped ones, before this training; a resumed one continues from there."""
        self._is_due, self._has_applied = False, False
        """Whether the next step has gradients to apply; whether an update of this training was applied."""
        self._updates_before: int | None = None
        """Those that an optimizer of this library had counted before this training."""

    def metrics(self) -> dict[str, float]:
        """Return what the next line of the log has beside the Trainer's numbers.

        The Trainer puts a mean of earlier losses in the place of one that is not finite, 0 where there is none; the
        mean over such a line's updates is not a number, and is logged as that.
        """
        lacks_loss, self._lacks_loss = self._lacks_loss, False
        return {"skipped_updates": self.num_skipped, **({"loss": math.nan} if lacks_loss else {})}

    def watch(self, trainer: Trainer) -> None:
        """See every loss that a Trainer trains on, the model's own or that of a function, on this instance alone.

        Args:
            trainer: Has not trained yet.
        """
        compute_loss = trainer.compute_loss

        @wraps(compute_loss)
        def watched(*args: Any, **kwargs: Any) -> Any:
            computed = compute_loss(*args, **kwargs)
            loss = computed[0] if isinstance(computed, tuple) else computed
            if loss.requires_grad:
                if self._stops and not bool(loss.isfinite().all()):
                    raise RuntimeError(
                        f"the loss is {loss.detach().float().sum().item()}, and --gradients stepped can't skip an "
                        "update; lower --learning_rate, look for broken rows, or take --gradients host"
                    )
                self._losses.append(loss.detach())
            return computed

        trainer.compute_loss = watched  # type: ignore[method-assign]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to look for an update that is applied."""
        self._first_step, self._first_skipped, self._has_applied = state.global_step, self.num_skipped, False
        self._updates_before = _updates_of(kwargs.get("optimizer"))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge the update that is about to be made; called after clipping.

        Raises:
            RuntimeError: If `limit` updates in a row were not finite, or the first one was made already.
        """
        model: nn.Module = kwargs["model"]
        own = self._find(model, judge_gradients=not args.fp16)
        found, lacks_loss = _on_any_rank(own, args.device)
        self._losses.clear()
        # DeepSpeed and a step in the backward leave no gradients behind.
        self._is_due = not self.can_skip or self._stops or any(each.grad is not None for each in model.parameters())
        if found is None:
            self._num_in_a_row = 0
            return
        self._is_due = False
        self._lacks_loss |= lacks_loss
        if not self.can_skip:
            raise RuntimeError(
                f"step {state.global_step + 1}: {found}, and DeepSpeed has made that update already; resume from the "
                "last checkpoint with a lower --learning_rate or --max_grad_norm, or look for broken rows"
            )
        model.zero_grad()
        self.num_skipped += 1
        self._num_in_a_row += 1
        step = state.global_step + 1
        self._say(f"step {step}: {found}; this update is skipped ({self.num_skipped} so far)")
        if self._num_in_a_row >= self._limit:
            raise RuntimeError(
                f"{self._num_in_a_row} updates in a row were not finite, the last at step {step} ({found}); lower "
                "--learning_rate or --max_grad_norm, look for broken rows, or raise --non_finite_limit"
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look whether the update was applied: not skipped here, nor by a loss scale, nor for want of gradients."""
        updates = _updates_of(kwargs["optimizer"])
        if updates is not None:
            self._is_due = updates > (self._updates_before or 0)
        self._has_applied |= self._is_due and not getattr(kwargs["optimizer"], "step_was_skipped", False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a training that changed nothing; of the rest of a resumed one, only say so.

        Raises:
            RuntimeError: If there were updates from the start, and none was applied.
        """
        num_updates, num_skipped = state.global_step - self._first_step, self.num_skipped - self._first_skipped
        if not num_updates or self._has_applied:
            return
        message = f"none of the {num_updates} updates since step {self._first_step} was applied"
        if num_skipped == num_updates:
            message += ", as their losses or gradients were not finite"
        elif args.fp16:
            message += ", as their gradients overflowed under fp16, whose loss scale falls for some updates"
        else:
            message += ", as no gradient reached the trained weights"
        if self._first_step:
            self._say(f"warning: {message}; the model is that of the checkpoint")
            return
        raise RuntimeError(
            f"{message}. The model is as it was. Lower --learning_rate or --max_grad_norm, look for broken rows, take "
            "more updates or bf16, or check that the loss depends on the trained weights"
        )

    def _find(self, model: nn.Module, *, judge_gradients: bool) -> str | None:
        """What is not finite, or None."""
        signs = [(_LOSS, loss.float().sum()) for loss in self._losses]
        gradients = [each.grad for each in model.parameters() if judge_gradients and each.grad is not None]
        if gradients:
            norm: Any = torch.nn.utils.get_total_norm(gradients)
            # Of sharded gradients it is sharded itself.
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


def _updates_of(optimizer: Any) -> int | None:
    """Return the updates that an optimizer of this library has applied; None for another, or for none."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner.updates if isinstance(inner, Sliver) else None


def keep_events_in(trainer: Trainer, folder: Path) -> None:
    """Let TensorBoard's files lie in a run's folder, in one place also where the run is resumed.

    Its callback chooses a place when training begins; what is logged before, such as the first evaluation, and then the
    whole run, would go to a folder of the working directory.

    Args:
        trainer: Has not logged yet.
        folder: The run's; they come into `tensorboard` in it, unless TENSORBOARD_LOGGING_DIR names another place.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = str(folder / "tensorboard")


def _on_any_rank(found: str | None, device: torch.device) -> tuple[str | None, bool]:
    """Return what was found here, or else that another rank has found something; and whether a rank has no loss."""
    flags = [found is not None, found is not None and found.startswith(_LOSS)]
    is_found, lacks_loss = are_on_any_rank(flags, device, "looking for losses that are not finite")
    if found is None and is_found:
        found = "a loss or gradient of another rank is not finite"
    return found, lacks_loss
