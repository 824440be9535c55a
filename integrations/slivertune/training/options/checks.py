"""What of a command line does not hold together, said before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainingArguments

from slivertune.interop.refusals import check_base_optimizer, check_best_model
from slivertune.planning.four_bit_rules import clash_with_method
from slivertune.training.extras import require
from slivertune.training.options.data import DataArguments
from slivertune.training.options.hift import HiFTArguments
from slivertune.training.options.lora import LoraArguments
from slivertune.training.options.method import Method
from slivertune.training.options.model import ModelArguments
from slivertune.training.options.sft import SFTArguments
from slivertune.training.options.tokens import TokenArguments

_SETTINGS_OF_METHOD: dict[Method, Any] = {"hift": HiFTArguments, "sft": SFTArguments, "lora": LoraArguments}
"""What one method alone reads."""


def enum_value(value: Any) -> str:
    """A `TrainingArguments` field that is an enumeration or its value, as it is typed on the command line."""
    return str(getattr(value, "value", value))


def check_method(method: Method, given: frozenset[str]) -> None:
    """Refuse settings that only another method reads, and a method whose library is not there.

    Args:
        method: The method.
        given: Names of the arguments that the user set.

    Raises:
        ValueError: If a setting would be ignored.
        ImportError: If PEFT is needed and not installed.
    """
    for name, kind in _SETTINGS_OF_METHOD.items():
        unused = [f"--{item.name}" for item in dataclasses.fields(kind) if item.name in given]
        if method != name and unused:
            raise ValueError(f"{', '.join(unused)}: only --method {name} reads this; leave it out or choose {name}")
    if method == "lora":
        require("peft", "--method lora")


def check_model(method: Method, model: ModelArguments) -> None:
    """Refuse 4-bit weights for methods that change every weight.

    Args:
        method: The method.
        model: Says whether 4-bit weights are asked for.

    Raises:
        ValueError: If the method can't train so.
        ImportError: If bitsandbytes is needed and not installed.
    """
    if not model.load_in_4bit:
        return
    if (clash := clash_with_method(method)) is not None:
        raise ValueError(clash)
    require("bitsandbytes", "--load_in_4bit")


def check_given(values: dict[str, Any]) -> None:
    """Refuse what a run does not do, before `TrainingArguments` acts on it.

    Args:
        values: What the user typed, by name.

    Raises:
        ValueError: If there is such an argument.
    """
    limit = values.get("save_total_limit")
    if limit is not None and limit < 1:
        raise ValueError(f"save_total_limit={limit} must be at least 1; leave it out to keep all checkpoints")


def check_training(method: Method, data: DataArguments, training: TrainingArguments) -> None:
    """Refuse arguments of the Trainer that don't fit the method or the task.

    Args:
        method: The method.
        data: Names the task.
        training: The Trainer's arguments.

    Raises:
        ValueError: If one does not fit.
    """
    if method == "hift":
        check_base_optimizer(training)
    if method == "sft":
        check_best_model(training)
    # These tasks bring a loss and a metric of their own, beside which the Trainer would ignore these in silence.
    for name in ("label_smoothing_factor", "batch_eval_metrics"):
        if data.task != "causal_lm" and getattr(training, name):
            raise ValueError(f"--{name} {getattr(training, name)} has no effect on --task {data.task}; leave it out")


def check_step_in_backward(hift: HiFTArguments, training: TrainingArguments) -> None:
    """Refuse what comes between the gradients and the step, where HiFT steps inside the backward.

    Args:
        hift: HiFT's settings.
        training: The Trainer's arguments.

    Raises:
        ValueError: If the run has any of it.
    """
    if not hift.step_in_backward:
        return
    for is_asked, name, reason, way_out in (
        (
            training.max_grad_norm > 0,
            f"--max_grad_norm {training.max_grad_norm:g}",
            "the norm of all gradients is known only when they are gone",
            "give --max_grad_norm 0",
        ),
        (
            training.gradient_accumulation_steps > 1,
            f"--gradient_accumulation_steps {training.gradient_accumulation_steps}",
            "the first gradient of a tensor is stepped on",
            "leave it out",
        ),
        (training.fp16, "--fp16", "gradients are unscaled after the backward", "take --bf16"),
    ):
        if is_asked:
            raise ValueError(
                f"--step_in_backward does not go with {name}: {reason}; {way_out}, or leave out the former"
            )


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
