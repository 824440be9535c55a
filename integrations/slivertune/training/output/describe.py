"""What a run says of itself before it starts."""

from __future__ import annotations

from typing import Any

import torch

from slivertune import __version__
from slivertune.sft.delta_parameters import DELTA_PARAMETERS_NAME
from slivertune.training.options.checks import enum_value
from slivertune.training.ready import Run


def describe(run: Run) -> None:
    """Say what is about to be done.

    Args:
        run: What `assemble` made.
    """
    say, training, arguments = run.display.say, run.arguments.training, run.arguments
    model: Any = run.trainer.model
    say(f"slivertune {__version__}: {run.method.name} on {run.model_name}")
    say(f"  model   {run.num_parameters:,} weights in {_kinds_of_weights(model)} on {training.device}{_trained(run)}")
    say(
        f"  data    {run.dataset_name}: {len(run.task.train_dataset):,} rows to train on, "
        f"{len(run.task.eval_dataset):,} to evaluate on, up to {run.task.max_length} tokens each"
    )
    say(_batch(run))
    for line in run.method.lines():
        say(line)
    if run.tokens is not None:
        say(run.tokens.line())
    schedule = enum_value(training.lr_scheduler_type)
    say(f"  rate    {training.learning_rate:g}, {run.method.optimizer_name(training)}, {schedule} schedule")
    say(f"  writes  {training.output_dir}")
    is_own_rate = arguments.model.model_name_or_path is None or "learning_rate" in arguments.given
    notes = run.method.notes(model, learning_rate=None if is_own_rate else training.learning_rate)
    for note in (*notes, *arguments.folder.notes):
        say(f"note: {note}")
    if arguments.folder.checkpoint is not None:
        say(f"note: continuing from {arguments.folder.checkpoint}")


def _batch(run: Run) -> str:
    """How many rows an update sees, and what that is the product of."""
    training = run.arguments.training
    rows, accumulated, ranks = (
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
        training.world_size,
    )
    parts = [f"{rows} at a time"]
    parts += [f"{accumulated} times"] if accumulated > 1 else []
    parts += [f"on each of {ranks} ranks ({run.layout})"] if ranks > 1 else []
    return f"  batch   {rows * accumulated * ranks} rows an update: {', '.join(parts)}"


def _kinds_of_weights(model: torch.nn.Module) -> str:
    """What the weights are held in, as "float32" or "bfloat16/nf4"; SFT's deltas are none."""
    return "/".join(
        sorted(
            {
                str(parameter.dtype).removeprefix("torch.") if quantised is None else str(quantised.quant_type)
                for name, parameter in model.named_parameters()
                if DELTA_PARAMETERS_NAME not in name.split(".")
                for quantised in [getattr(parameter, "quant_state", None)]
            }
        )
    )


def _trained(run: Run) -> str:
    if run.num_trained == run.num_parameters:
        return ""
    return f", {run.num_trained:,} of them trained ({run.num_trained / run.num_parameters:.2%})"
