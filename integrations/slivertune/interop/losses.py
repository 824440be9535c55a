"""TokenTune under a Trainer that computes its loss outside the model: adapted to the selected tokens, or refused."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeAlias

import torch
from transformers import Trainer

from slivertune.core.parameters import NOTHING_TRAINS
from slivertune.core.reentrant import is_trainable
from slivertune.core.refused_pairs import refuse_together
from slivertune.tokentune import TokenTune, TokenTuneHandle
from slivertune.tokentune.head import find_head_kind
from slivertune.tokentune.hook import find_model

ComputeLoss: TypeAlias = Callable[..., Any]

_COMPLETIONS = "compares the summed log-probabilities of whole completions"
_POLICY = "weighs every token of a completion by how its log-probability has changed since the completion was drawn"
_TEACHER = "compares the distribution at every token with a teacher's"
_LOSSES_OF_TRL = {
    "BCOTrainer": _COMPLETIONS,
    "CPOTrainer": _COMPLETIONS,
    "DPOTrainer": _COMPLETIONS,
    "KTOTrainer": _COMPLETIONS,
    "ORPOTrainer": _COMPLETIONS,
    "OnlineDPOTrainer": _COMPLETIONS,
    "TPOTrainer": _COMPLETIONS,
    "GRPOTrainer": _POLICY,
    "RLOOTrainer": _POLICY,
    "DistillationTrainer": _TEACHER,
    "GKDTrainer": _TEACHER,
    "GOLDTrainer": _TEACHER,
}
"""Descriptions of trl 1.16's losses, by trainer."""
_TRL_THAT_WORKS = ("SFTTrainer", "RewardTrainer")


def attach_tokens(trainer: Trainer, tune: TokenTune, model: Any) -> TokenTuneHandle:
    """Attach TokenTune to a Trainer's model, and restrict the Trainer's loss to the selected tokens.

    Args:
        trainer: The Trainer; if needed, its `compute_loss` is overridden on this instance until the handle is removed.
        tune: Settings of the selection.
        model: The Trainer's model.

    Returns:
        The handle.

    Raises:
        RuntimeError: If the model is hooked already.
        ValueError: If nothing trains, the Trainer's loss needs all tokens, or the model can't be hooked.
    """
    if not is_trainable(model):
        raise ValueError(NOTHING_TRAINS)
    trl_kind = _trl_kind(trainer)
    _check_loss(trainer, trl_kind, by_token=find_head_kind(find_model(model)) in ("causal", "token"))
    handle = tune.attach(model)
    if trl_kind == "SFTTrainer":
        handle.on_remove(_override_loss(trainer, lambda own: _divided_by_selected(own, handle)))
    elif type(trainer).compute_loss is not Trainer.compute_loss:
        handle.on_remove(_override_loss(trainer, lambda own: _explained(own, handle, type(trainer).__name__)))
    return handle


def _trl_kind(trainer: Trainer) -> str | None:
    """Name TRL's trainer that a trainer is an instance of. Return None for any other."""
    names = [each.__name__ for each in type(trainer).__mro__ if each.__module__.partition(".")[0] == "trl"]
    return names[0] if names else None


def _check_loss(trainer: Any, trl_kind: str | None, *, by_token: bool) -> None:
    """Refuse losses that need values which TokenTune does not compute."""
    name = type(trainer).__name__
    if trl_kind is not None and trl_kind not in _TRL_THAT_WORKS:
        does = _LOSSES_OF_TRL.get(trl_kind, "makes its loss of the log-probabilities of all tokens")
        raise ValueError(
            f"TokenTune does not go with TRL's {trl_kind}, which {does}, since unselected tokens have no gradient. "
            "Train it with HiFT or SFT, or without TokenTune. TokenTune works under SFTTrainer and RewardTrainer"
        )
    scores = by_token and trainer.compute_loss_func is not None
    smooths = by_token and trainer.label_smoother is not None and getattr(trainer.args, "loss_type", None) != "dft"
    smoothing = f"label_smoothing_factor={trainer.args.label_smoothing_factor} of this {name}"
    has_router_loss = getattr(trainer, "aux_loss_enabled", False)
    refuse_together(
        {
            "TokenTune": "TokenTune",
            "use_liger_kernel": "use_liger_kernel=True" if trainer.args.use_liger_kernel else None,
            "compute_loss_func": f"the compute_loss_func of this {name}" if scores else None,
            "label_smoothing_factor": smoothing if smooths else None,
            "router_aux_loss_coef": f"the router's auxiliary loss of this {name}" if has_router_loss else None,
        }
    )
    if trl_kind == "SFTTrainer" and not hasattr(import_module("trl.trainer.utils"), "add_fused_lm_head"):
        raise ValueError(
            f"TokenTune does not go with the SFTTrainer of trl {import_module('trl').__version__}, which needs the "
            "logits of all tokens for its loss or its metrics. Install trl 1.15 or later. HiFT and SFT go with any"
        )


def _override_loss(trainer: Any, wrap: Callable[[ComputeLoss], ComputeLoss]) -> Callable[[], None]:
    """Override `compute_loss` on a Trainer's instance. Return a function that undoes it unless overridden again."""
    was_own, own = "compute_loss" in vars(trainer), trainer.compute_loss
    trainer.compute_loss = wrapped = wrap(own)

    def undo() -> None:
        if vars(trainer).get("compute_loss") is not wrapped:
            return
        if was_own:
            trainer.compute_loss = own
        else:
            del trainer.compute_loss

    return undo


def _divided_by_selected(own: ComputeLoss, handle: TokenTuneHandle) -> ComputeLoss:
    """Wrap a loss that is divided by the number of labels in an update, so that only selected labels count.

    TRL may also divide by the labels that the model's head was given; these are already the selected ones.
    """

    @wraps(own)
    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        # Of another Trainer over this model, the hook refuses the loss.
        handle.is_scored_outside = True
        try:
            if num_items_in_batch is None or not model.training:
                return own(model, inputs, return_outputs, num_items_in_batch, **kwargs)
            # The trainer divides after its forward, in which the selection is drawn.
            num_items = torch.as_tensor(num_items_in_batch, dtype=torch.float32).clone()

            def fill(*_: Any) -> None:
                if handle.last_targets is not None:
                    num_items.copy_(handle.last_targets.selected_items(num_items_in_batch))

            filling = model.register_forward_hook(fill)
            try:
                return own(model, inputs, return_outputs, num_items, **kwargs)
            finally:
                filling.remove()
                handle.last_targets = None
        finally:
            handle.is_scored_outside = False

    return compute_loss


def _explained(own: ComputeLoss, handle: TokenTuneHandle, name: str) -> ComputeLoss:
    """Wrap a loss, so that its error mentions the mismatch of selected logits and all labels."""

    @wraps(own)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        num_draws = handle.num_draws
        try:
            return own(*args, **kwargs)
        except Exception as error:
            # Without targets, the forward failed; without memory, the loss may be correct.
            has_logits = handle.num_draws > num_draws and handle.returns_selected
            if has_logits and not isinstance(error, torch.OutOfMemoryError):
                error.add_note(
                    f"{name}.compute_loss computes a loss of its own. Under TokenTune the model returns logits of the "
                    "selected tokens, which don't fit labels of all. Use the loss that the model returns, or train "
                    "without TokenTune"
                )
            raise

    return compute_loss
