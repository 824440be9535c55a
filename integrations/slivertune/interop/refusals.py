"""What of a Trainer's arguments does not go with a sliver of the model, said before it trains."""

from typing import Any

from transformers import Trainer, TrainingArguments

from slivertune.hift import HiFTConfig
from slivertune.hift.unsupported_optimizers import refuse_name
from slivertune.parallel.layout import layout_of


def check_base_optimizer(training: TrainingArguments) -> None:
    """Refuse optimizers that HiFT can't rotate.

    Args:
        training: Its `optim` names the optimizer.

    Raises:
        ValueError: If it is one of them, with the reason.
    """
    refuse_name(str(getattr(training.optim, "value", training.optim)))


def check_step_in_backward(config: HiFTConfig, training: TrainingArguments) -> None:
    """Refuse what would come between a gradient and its step, where backward itself steps.

    Args:
        config: HiFT's settings.
        training: Clips, accumulates and scales gradients.

    Raises:
        ValueError: If any of that is asked for.
    """
    if config.step_in_backward and (
        training.max_grad_norm > 0 or training.gradient_accumulation_steps > 1 or training.fp16
    ):
        raise ValueError(
            "step_in_backward=True leaves no gradients to clip, accumulate or unscale; set max_grad_norm=0, "
            "gradient_accumulation_steps=1 and fp16=False in the Trainer's arguments, or leave step_in_backward off"
        )


def check_best_model(training: TrainingArguments) -> None:
    """Refuse, for SFT, to bring back the best weights at the end.

    Args:
        training: Says whether the best model is loaded at the end.

    Raises:
        ValueError: If it is.
    """
    if training.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end does not go with SFT: the Trainer would bring back the best weights without the "
            "deltas that belong to them; leave it out"
        )


def check_trainer(trainer: Trainer, name: str) -> None:
    """Refuse Trainers that don't ask for their optimizer, or share the work in a way that HiFT and SFT do not know.

    Args:
        trainer: Has not trained yet.
        name: What is to be attached.

    Raises:
        RuntimeError: If it has an optimizer already.
        ValueError: If it would use DataParallel, an unknown layout, or an optimizer of DeepSpeed's.
    """
    if trainer.optimizer is not None:
        raise RuntimeError(
            f"the Trainer has an optimizer already; give it none, and attach {name} once, before it trains"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{trainer.args.n_gpu} GPUs are visible to one process, and the Trainer would spread each batch over them "
            "by DataParallel; start one process a GPU (torchrun, accelerate launch), or show it one GPU by "
            "CUDA_VISIBLE_DEVICES"
        )
    layout = layout_of(trainer.accelerator)
    if layout.startswith("zero"):
        plugin: Any = trainer.accelerator.state.deepspeed_plugin
        if "optimizer" in plugin.deepspeed_config:
            raise ValueError(
                f"the DeepSpeed config has an optimizer of its own, past which {name} can't train; take that section "
                "out: the Trainer's arguments say which optimizer it is"
            )
