"""The loss of a causal language model in a run, computed in chunks if possible."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from slivertune.chunked_loss import ChunkedCrossEntropyHandle, attach_chunked_cross_entropy, why_not_chunked
from slivertune.core.compiled_blocks import has_compiled_blocks
from slivertune.parallel.layout import layout_of
from slivertune.training.tasks.task import Task


def attach_loss(
    trainer: Trainer, task: Task, say: Callable[[str], None], *, wanted: bool
) -> ChunkedCrossEntropyHandle | None:
    """Compute the loss of a causal language model in chunks, in training and evaluation, until the handle is removed.

    Args:
        trainer: Trainer with the model as it will be trained, adapters and all methods' hooks included.
        task: Task of the run; only causal language modelling has this loss.
        say: Function that shows a line with the reason if the loss can't be chunked.
        wanted: Whether a chunked loss is requested.

    Returns:
        The handle; None if the loss is unchanged.
    """
    if not wanted or task.model_kind != "causal_lm" or task.compute_loss_func is not None:
        return None
    model: Any = trainer.model
    arguments = trainer.args
    reasons = (
        (arguments.label_smoothing_factor, "--label_smoothing_factor computes it outside the model"),
        # Compilation by block does not include the loss.
        (arguments.torch_compile and not has_compiled_blocks(model), "--torch_compile can't see into it"),
        (
            layout_of(trainer.accelerator) in ("fsdp2", "zero3"),
            "the head's weight is sharded over the ranks, which gather it only for the head's own forward",
        ),
        (arguments.use_liger_kernel, "--use_liger_kernel brings a loss of its own"),
    )
    # Check under training's autocast: without it, fp32 adapters may not fit a bf16 head.
    with trainer.accelerator.autocast():
        reason = next((text for is_so, text in reasons if is_so), None) or why_not_chunked(model)
    if reason is not None:
        say(f"note: the loss is computed from whole logits, not in chunks, since {reason}")
        return None
    # If there is no metric, the Trainer's evaluation reads the loss alone.
    return attach_chunked_cross_entropy(model, evaluation=task.compute_metrics is None)
