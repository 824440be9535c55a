"""The loss of a causal language model in a run: in chunks where it can be."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from slivertune.chunked_loss import ChunkedCrossEntropyHandle, attach_chunked_cross_entropy, why_not_chunked
from slivertune.parallel.layout import layout_of
from slivertune.training.tasks.task import Task

_WHOLE_LOGITS = "note: the loss is computed from whole logits, not in chunks, since {reason}"


def attach_loss(
    trainer: Trainer, task: Task, say: Callable[[str], None], *, wanted: bool
) -> ChunkedCrossEntropyHandle | None:
    """Compute the loss of a causal language model in chunks, in training and evaluation, until the handle is removed.

    Args:
        trainer: Holds the model as it will be trained, adapters and all methods' hooks included.
        task: What is learned; other tasks have no such loss.
        say: Told in one line why the loss can't be chunked, if it can't.
        wanted: Whether it should be.

    Returns:
        The handle; None where the loss stays as it is.
    """
    if not wanted or task.model_kind != "causal_lm" or task.compute_loss_func is not None:
        return None
    model: Any = trainer.model
    # As training runs it: without autocast, the fp32 norms of a 4-bit model don't go with a head in bf16.
    with trainer.accelerator.autocast():
        reason = _why_not_in_this_run(trainer) or why_not_chunked(model)
    if reason is not None:
        say(_WHOLE_LOGITS.format(reason=reason))
        return None
    # Without a metric, the Trainer's evaluation reads the loss alone.
    return attach_chunked_cross_entropy(model, evaluation=task.compute_metrics is None)


def _why_not_in_this_run(trainer: Trainer) -> str | None:
    arguments = trainer.args
    if arguments.label_smoothing_factor:
        return "--label_smoothing_factor computes it outside of the model"
    if arguments.torch_compile:
        return "--torch_compile can't see into it"
    if layout_of(trainer.accelerator) in ("fsdp2", "zero3"):
        return "the head's weight is shared out over the ranks, which gather it for the head's own forward alone"
    if arguments.use_liger_kernel:
        return "--use_liger_kernel brings a loss of its own"
    return None
