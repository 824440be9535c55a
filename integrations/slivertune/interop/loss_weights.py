"""A Trainer loss's own weights, such as the classifier of sentence-transformers' SoftmaxLoss.

Sentence-transformers trains them with the model, but saves none of them.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core import atomic
from slivertune.core.reentrant import is_trainable
from slivertune.core.saved_state import refuse_damage
from slivertune.core.saved_values import check_finite
from slivertune.interop.checkpoints import checkpoint_folder
from slivertune.parallel.layout import layout_of

LOSS_NAME = "slivertune_loss.safetensors"
"""Name of the checkpoint file with these weights."""


def with_loss(trainer: Any, model: nn.Module) -> nn.Module:
    """Return the trained module: the model, or the Trainer's loss around it if the loss has weights that train.

    Args:
        trainer: The Trainer; its `loss`, if any, is a module that holds the model, or a dictionary of such modules.
        model: The Trainer's model.

    Returns:
        A module with all parameters that the Trainer's own optimizer would train.

    Raises:
        ValueError: If the loss has weights and there are several ranks, which would not share them.
    """
    weights = loss_weights(trainer, model)
    if not any(weight.requires_grad for weight in weights.values()):
        return model
    layout = layout_of(trainer.accelerator)
    if layout != "single":
        raise ValueError(
            f"the loss of this {type(trainer).__name__} has weights of its own ({', '.join(weights)}), which are not "
            f"in the model that {layout} spreads over the ranks. Train it on one device"
        )
    return _loss_module(trainer)


def loss_weights(trainer: Any, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a Trainer's loss that are not the model's, by name.

    Args:
        trainer: The Trainer.
        model: The Trainer's model.
    """
    loss = getattr(trainer, "loss", None)
    if not isinstance(loss, nn.Module | dict):
        return {}
    whole, known = _loss_module(trainer), set(model.parameters())
    # A guide or a teacher belongs to its own checkpoint.
    frozen = (each for each in whole.modules() if isinstance(each, PreTrainedModel) and not is_trainable(each))
    known.update(each for module in frozen for each in module.parameters())
    # SFT's deltas are parameters of the modules that they train, but no weights of a saved model.
    saved = whole.state_dict().keys()
    return {name: each for name, each in whole.named_parameters() if each not in known and name in saved}


def _loss_module(trainer: Any) -> nn.Module:
    loss = trainer.loss
    return nn.Sequential(OrderedDict(loss)) if isinstance(loss, dict) else loss


def load_loss_weights(trainer: Trainer, checkpoint: Path) -> None:
    """Load the loss's own weights from a checkpoint.

    Args:
        trainer: The Trainer; nothing happens if its loss has no weights.
        checkpoint: Folder of the checkpoint.

    Raises:
        ValueError: If the checkpoint has none, or those of another loss.
    """
    model: Any = trainer.model
    weights = loss_weights(trainer, model)
    if not weights:
        return
    path = checkpoint / LOSS_NAME
    with refuse_damage(path):
        saved = load_file(path) if path.is_file() else {}
    shapes = {name: tuple(each.shape) for name, each in weights.items()}
    if {name: tuple(each.shape) for name, each in saved.items()} != shapes or any(
        each.is_floating_point() != weights[name].is_floating_point() for name, each in saved.items()
    ):
        raise ValueError(
            f"{path} has {', '.join(saved) or 'nothing'}, and the loss of this {type(trainer).__name__} has weights of "
            f"its own {shapes}. Resume with the loss of the saved run"
        )
    check_finite(str(path), saved)
    with torch.no_grad():
        for name, each in weights.items():
            each.copy_(saved[name])


class KeepLossWeights(TrainerCallback):
    """Writes the loss's own weights into every checkpoint, and loads those of the best model.

    Args:
        trainer: The Trainer; its loss may have no weights.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was just saved."""
        model: Any = self._trainer.model
        weights = loss_weights(self._trainer, model)
        if weights and state.is_world_process_zero:
            with atomic.atomic_file(checkpoint_folder(args, state) / LOSS_NAME) as path:
                save_file({name: each.detach().contiguous() for name, each in weights.items()}, path)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the weights that belong to the best model, which the Trainer has just loaded."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_loss_weights(self._trainer, Path(state.best_model_checkpoint))
