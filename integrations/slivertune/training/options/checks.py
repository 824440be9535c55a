"""What of a command line does not hold together, said before anything is loaded."""

from typing import Any

from transformers import TrainingArguments

from slivertune.training.options.arguments import TokenArguments
from slivertune.training.options.data import DataArguments


def enum_value(value: Any) -> str:
    """A `TrainingArguments` field that is an enumeration or its value, as it is typed on the command line."""
    return str(getattr(value, "value", value))


def check_task(data: DataArguments, training: TrainingArguments) -> None:
    """Refuse arguments of the Trainer that don't fit the task.

    Args:
        data: Names the task.
        training: The Trainer's arguments.

    Raises:
        ValueError: If one does not fit.
    """
    # These tasks bring a loss and a metric of their own, beside which the Trainer would ignore these in silence.
    for name in ("label_smoothing_factor", "batch_eval_metrics"):
        if data.task != "causal_lm" and getattr(training, name):
            raise ValueError(f"--{name} {getattr(training, name)} has no effect on --task {data.task}; leave it out")


def check_tokens(tokens: TokenArguments, data: DataArguments, training: TrainingArguments) -> None:
    """Refuse losses that token selection can't shrink: they are computed outside of the model.

    Args:
        tokens: Says whether tokens are selected.
        data: Names the task.
        training: The Trainer's arguments.

    Raises:
        ValueError: If the run has such a loss.
    """
    if tokens.token_ratio is None:
        return
    if training.label_smoothing_factor:
        raise ValueError(
            f"--label_smoothing_factor {training.label_smoothing_factor} does not go with --token_ratio: the smoothed "
            "loss would score positions that carry no gradient; leave out one of the two"
        )
    if data.task == "prompt_classification":
        raise ValueError(
            "--token_ratio does not go with --task prompt_classification: its loss reads the label word's place alone, "
            "outside the model, and that place may not be selected; leave it out, or take --task classification"
        )
