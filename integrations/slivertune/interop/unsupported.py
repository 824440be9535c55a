"""Trainers that can't train a sliver, and changes of a Trainer between `attach` and its training."""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from slivertune.core.options import enum_value
from slivertune.parallel.layout import layout_of

_READ_AT_ATTACH = (
    "learning_rate",
    "weight_decay",
    "optim",
    "optim_args",
    "optim_target_modules",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
"""The Trainer's arguments that an optimizer is made with."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse arguments with which a Trainer bypasses what is attached.

    Args:
        trainer: The Trainer.

    Raises:
        ValueError: If it has such arguments; names them and the way out.
    """
    arguments: Any = trainer.args
    if arguments.n_gpu > 1:
        raise ValueError(
            f"{arguments.n_gpu} GPUs are visible to one process, and the Trainer would spread each batch over them by "
            "DataParallel. Start one process per GPU (torchrun, accelerate launch), or set CUDA_VISIBLE_DEVICES to one "
            "GPU"
        )
    if getattr(arguments, "enable_jit_checkpoint", False):
        raise ValueError(
            "enable_jit_checkpoint=True saves checkpoints without telling callbacks, so they would lack what "
            "slivertune adds to them, and could not be resumed. Set it to False, and save often (save_steps)"
        )
    strategy = enum_value(arguments.hub_strategy)
    if arguments.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        raise ValueError(
            f"hub_strategy={strategy!r} uploads each checkpoint before callbacks have written their part of it, so it "
            "could not be resumed. Use hub_strategy='every_save' or 'end', which upload the model"
        )


def check_has_no_optimizer(trainer: Trainer, name: str) -> None:
    """Refuse Trainers that have an optimizer, or whose DeepSpeed config has one.

    Args:
        trainer: The Trainer.
        name: Name of the method that would train.

    Raises:
        RuntimeError: If the Trainer has an optimizer.
        ValueError: If its DeepSpeed config has one.
    """
    if trainer.optimizer is not None:
        raise RuntimeError(
            f"the Trainer has an optimizer already. Give it none, and attach {name} once, before it trains"
        )
    plugin: Any = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if layout_of(trainer.accelerator).startswith("zero") and "optimizer" in plugin.deepspeed_config:
        raise ValueError(
            f"the DeepSpeed config has an optimizer of its own, and {name} can't train beside it. Remove that section: "
            "the Trainer's arguments name the optimizer"
        )


def read_arguments(trainer: Trainer) -> dict[str, Any]:
    """Return the Trainer's arguments that an optimizer is made with.

    Args:
        trainer: The Trainer.
    """
    return {name: getattr(trainer.args, name) for name in _READ_AT_ATTACH}


def check_unchanged(trainer: Trainer, model: Any, made_with: Mapping[str, Any]) -> None:
    """Refuse a training of another model, or by other arguments, than what was attached was made for.

    Args:
        trainer: The Trainer that begins a training.
        model: Its model at `attach`, or at the end of its last training.
        made_with: Result of `read_arguments` when the optimizer was made. Empty if there is none.

    Raises:
        RuntimeError: If the model or an argument has changed.
    """
    if trainer.model is not model:
        raise RuntimeError(
            "trainer.model was replaced after slivertune.attach, which has hooked the one before. Give the Trainer its "
            "model (with adapters, if any) when you make it, and attach then"
        )
    changed = [
        f"{name} ({value!r}, now {getattr(trainer.args, name)!r})"
        for name, value in made_with.items()
        if getattr(trainer.args, name) != value
    ]
    if changed:
        raise RuntimeError(
            f"the Trainer's arguments were changed after slivertune.attach, which has made the optimizer with them: "
            f"{', '.join(changed)}. Set them before, or make a new Trainer"
        )
