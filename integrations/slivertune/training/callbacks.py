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
from slivertune.interop.checkpoints import KeepManifest, checkpoint_folder
from slivertune.parallel.checkpoint.manifests import write_together
from slivertune.parallel.consistency.heartbeat import guard, world_size
from slivertune.training.output.folders import checkpoint_folders, checkpoint_step, remove_old


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
        self.num_skipped = 0
        """Updates that were skipped so far."""

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

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge the update that is about to be made; called after clipping.

        Raises:
            RuntimeError: If `limit` updates in a row were not finite, or the first one was made already.
        """
        model: nn.Module = kwargs["model"]
        found = _on_any_rank(self._find(model, judge_gradients=not args.fp16), args.device)
        self._losses.clear()
        if found is None:
            self._num_in_a_row = 0
            return
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

    def _find(self, model: nn.Module, *, judge_gradients: bool) -> str | None:
        """What is not finite, or None."""
        signs = [("loss", loss.float().sum()) for loss in self._losses]
        gradients = [each.grad for each in model.parameters() if judge_gradients and each.grad is not None]
        if gradients:
            norm: Any = torch.nn.utils.get_total_norm(gradients)
            # Of sharded gradients it is sharded itself.
            if hasattr(norm, "full_tensor"):
                with guard("adding up the norm of the gradients", computes=True):
                    norm = norm.full_tensor()
            signs.append(("gradient norm", norm.float()))
        if not signs:
            return None
        values = torch.stack([sign.to(signs[-1][1].device) for _, sign in signs]).tolist()
        for (name, _), value in zip(signs, values, strict=True):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        return None


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


def _on_any_rank(found: str | None, device: torch.device) -> str | None:
    """What was found here; or else that another rank has found something."""
    if world_size() == 1:
        return found
    is_found = torch.tensor(float(found is not None), device=device)
    with guard("looking for losses that are not finite"):
        torch.distributed.all_reduce(is_found, torch.distributed.ReduceOp.MAX)
    return found if found is not None or not is_found else "a loss or gradient of another rank is not finite"
