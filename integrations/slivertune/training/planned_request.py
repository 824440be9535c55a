"""Converts a run of `slivertune train` to a request of `slivertune plan`."""

from dataclasses import asdict
from typing import Any, get_args

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Trainer, TrainingArguments

from slivertune.core.options import enum_value
from slivertune.interop.auto_layers import longest_row
from slivertune.planning.optimizers import OptimizerName, optimizer_named
from slivertune.planning.request import AttentionName, PlanRequest, PrecisionName, TaskName
from slivertune.sft.delta_parameters import DELTA_PARAMETERS_NAME
from slivertune.training.command_line.parse import TrainArguments
from slivertune.training.command_line.plan_words import WITHOUT_PLAN, request_values
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.tasks.task import Task

_COPIES_TO_DECAY: tuple[OptimizerName, ...] = ("sgd", "sgd_momentum", "adagrad")
"""Optimizers that apply weight decay in a copy of all gradients."""


def plan_request(
    arguments: TrainArguments, trainer: Trainer, task: Task, layout: str, *, is_chunked: bool
) -> PlanRequest:
    """Return the plan request of a run.

    Args:
        arguments: Settings of the run.
        trainer: Trainer made from the settings.
        task: Task of the run, with its data.
        layout: Layout of the processes.
        is_chunked: Whether the loss is computed in chunks if the model allows it.

    Raises:
        ValueError: If the run has settings that a plan does not support.
    """
    _check(arguments, layout)
    training, method = arguments.training, arguments.method
    options = (asdict(each) for each in (arguments.run, arguments.tokens, arguments.parked, arguments.model))
    values = {
        "method": method.name,
        **method.values(),
        **{name: each for part in options for name, each in part.items()},
    }
    given, _ = request_values(values)
    if given.get("layers_per_group") == "auto":
        given["layers_per_group"] = 1
    given |= {
        "layout": layout,
        "num_gpus": training.world_size,
        "offload_parameters": _offloads(trainer, layout),
        "precision": _precision(arguments, trainer.model),
        "task": arguments.data.task,
        "batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "seq_length": _longest_row(task),
        "gradient_checkpointing": training.gradient_checkpointing,
        "chunked_cross_entropy": is_chunked,
        "kernels": "cpu" if training.device.type == "cpu" else "gpu",
    }
    master = given.pop("master", "none")
    if given["precision"] == "bf16" and master != "none":
        given |= {"master": master, "precision": "mixed_hi" if master == "fp32" else "bf16"}
    if task.id2label is not None:
        given["num_labels"] = len(task.id2label)
    if not method.is_optimizer:
        given["optimizer"] = _optimizer(training)
    return PlanRequest(**given)


def _offloads(trainer: Trainer, layout: str) -> bool:
    """Return whether DeepSpeed or FSDP2 offloads the run's parameters."""
    state = trainer.accelerator.state
    if layout == "zero3":
        settings = state.deepspeed_plugin.deepspeed_config["zero_optimization"].get("offload_param") or {}
        return str(settings.get("device", "none")) != "none"
    return layout == "fsdp2" and isinstance(state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


def _check(arguments: TrainArguments, layout: str) -> None:
    method = arguments.method
    training, attention = arguments.training, arguments.model.attn_implementation
    others = [f"--{name}" for name in method.not_planned if name in arguments.given]
    others += [
        f"--{name}" for name in WITHOUT_PLAN if name not in ("fp16", "torch_compile") and getattr(training, name)
    ]
    checkpointing: Any = training.gradient_checkpointing_kwargs or {}
    decays = training.weight_decay and not method.is_optimizer and _optimizer(training) in _COPIES_TO_DECAY
    planned = " and ".join(name for name, each in TRAIN_METHODS.items() if each.is_planned_on_ranks)
    for is_unknown, reason in (
        (
            arguments.data.task not in get_args(TaskName),
            f"plans support --task causal_lm and classification, not {arguments.data.task}",
        ),
        (arguments.run.keep_activations == "auto", "--keep_activations auto fills the memory that the device has left"),
        (training.torch_compile, "plans can't see into graphs of torch.compile"),
        (others, f"plans do not support {', '.join(others)}"),
        (
            attention not in (None, *get_args(AttentionName)),
            f"plans support --attn_implementation {' and '.join(get_args(AttentionName))}, not {attention}",
        ),
        (
            checkpointing.get("use_reentrant") or checkpointing.keys() - {"use_reentrant"},
            "plans support checkpointing only without --gradient_checkpointing_kwargs",
        ),
        (decays, f"plans do not support --weight_decay with --optim {enum_value(training.optim)}"),
        (
            layout != "single" and not method.is_planned_on_ranks,
            f"on several GPUs only {planned} are planned here. For {method.name}, see slivertune plan --layout",
        ),
    ):
        if is_unknown:
            raise ValueError(reason)


def _optimizer(training: TrainingArguments) -> OptimizerName:
    return optimizer_named(enum_value(training.optim), training.optim_args or "")


def _precision(arguments: TrainArguments, model: Any) -> PrecisionName:
    """Derive the precision from the weights' real dtypes: `--weights_dtype auto` may follow the checkpoint."""
    # SFT's packed deltas are bf16 beside weights of any type.
    weights = (each for name, each in model.named_parameters() if DELTA_PARAMETERS_NAME not in name.split("."))
    if any(weight.dtype == torch.bfloat16 for weight in weights):
        return "bf16"
    return "fp32" if arguments.precision.autocast == "no" else "mixed"


def _longest_row(task: Task) -> int:
    """Return the length of the longest training row in tokens. Rows of a batch are padded to at most this."""
    return min(task.max_length, longest_row(task.train_dataset) or task.max_length)
