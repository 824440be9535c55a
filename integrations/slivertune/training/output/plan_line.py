"""The planned peak of a run, said before it starts, and the measured one to hold against it when it is over."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.planning.make import make_plan
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest, PrecisionName
from slivertune.training.assemble import Run
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.arguments import enum_value
from slivertune.training.output.plan_process import plan_in_process

_OPTIMIZERS: dict[str, OptimizerName] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adagrad": "adagrad",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
}
"""Names of `TrainingArguments.optim` that a plan knows."""


class DevicePeak(TrainerCallback):
    """Measures the peak of updates on a CUDA device by `torch.cuda.max_memory_allocated`; nothing on others.

    What is allocated while the model is evaluated or saved is not counted.
    """

    def __init__(self) -> None:
        self.num_bytes: int | None = None
        """The largest so far; None before the first update, and without CUDA."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure."""
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the larger of this update's peak and those before."""
        if args.device.type == "cuda":
            self.num_bytes = max(self.num_bytes or 0, torch.cuda.max_memory_allocated(args.device))


def plan_run(run: Run) -> Plan | None:
    """Plan a run that is ready to start, and say so. No failure of a plan breaks a run.

    Args:
        run: Not yet training.

    Returns:
        The plan; None where there can be none.
    """
    say = run.display.say
    try:
        request = request_of(run)
        if dist.is_available() and dist.is_initialized():
            plan = plan_in_process(request, run.source.config)
        else:
            # A plan builds a model, whose initial weights must not move the run's random state.
            with torch.random.fork_rng(devices=[]):
                plan = make_plan(request, run.source.config)
    # Whatever a plan stumbles over, the run may do.
    except Exception as error:
        say(f"  memory  not planned: {' '.join(str(error).split()) or type(error).__name__}")
        return None
    peak, request = plan.peak, plan.request
    parts = {
        "weights": peak.parameters,
        "gradients": peak.gradients,
        "state": peak.state,
        "activations and other": peak.residual,
    }
    listed = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in parts.items())
    say(
        f"  memory  {plan.peak_bytes / 1e6:,.1f} MB planned at the peak ({listed}), for {request.batch_size} x "
        f"{request.seq_length} tokens"
    )
    return plan


def _offloads(run: Run) -> bool:
    """Whether the run's parameters wait on the host."""
    state = run.trainer.accelerator.state
    if run.layout == "zero3":
        settings = state.deepspeed_plugin.deepspeed_config["zero_optimization"].get("offload_param") or {}
        return str(settings.get("device", "none")) != "none"
    return run.layout == "fsdp2" and isinstance(state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


def request_of(run: Run) -> PlanRequest:
    """What to plan for a run.

    Args:
        run: Ready to start.

    Raises:
        ValueError: If the run has settings that a plan has no word for.
    """
    arguments, training = run.arguments, run.arguments.training
    _check(run)
    settings: dict[str, Any] = {
        "layout": run.layout,
        "num_gpus": training.world_size,
        "offload_parameters": _offloads(run),
        "method": run.method.name,
        "precision": _precision(run),
        "task": arguments.data.task,
        "batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "seq_length": _longest_row(run),
        "gradient_checkpointing": training.activation_checkpointing,
        "keep_activations": arguments.run.num_kept or 0,
        "chunked_cross_entropy": run.loss is not None,
        "token_ratio": arguments.tokens.token_ratio,
        "load_in_4bit": arguments.model.load_in_4bit,
    }
    if run.task.id2label is not None:
        settings["num_labels"] = len(run.task.id2label)
    if not run.method.is_optimizer:
        settings["optimizer"] = _optimizer(training)
    return PlanRequest(**settings | run.method.plan_settings(settings["precision"]))


def _check(run: Run) -> None:
    arguments, method = run.arguments, run.method
    others = [f"--{name}" for name in method.not_planned if name in arguments.given]
    planned = " and ".join(name for name, each in TRAIN_METHODS.items() if each.is_planned_on_ranks)
    for is_unknown, reason in (
        (
            arguments.data.task == "prompt_classification",
            "a plan knows causal_lm and classification, not prompt_classification",
        ),
        (arguments.run.num_kept == "auto", "--keep_activations auto fills what the device has left"),
        (arguments.training.torch_compile, "a plan can't see into what torch.compile makes"),
        (others, f"a plan has no word for {', '.join(others)}"),
        (
            run.layout != "single" and not method.is_planned_on_ranks,
            f"on several GPUs this line knows {planned}; for {method.name} see slivertune plan --layout",
        ),
    ):
        if is_unknown:
            raise ValueError(reason)


def _optimizer(training: TrainingArguments) -> OptimizerName:
    optim = enum_value(training.optim)
    if optim not in _OPTIMIZERS:
        raise ValueError(f"a plan does not know --optim {optim}, but {', '.join(_OPTIMIZERS)}")
    has_momentum = optim == "sgd" and "momentum=" in (training.optim_args or "")
    return "sgd_momentum" if has_momentum else _OPTIMIZERS[optim]


def _precision(run: Run) -> PrecisionName:
    """From what the weights are really held in: `--weights_dtype auto` may follow the checkpoint."""
    model: Any = run.trainer.model
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        return "bf16"
    return "fp32" if run.arguments.precision.autocast == "no" else "mixed"


def _longest_row(run: Run) -> int:
    """Tokens of the longest row that is trained on; rows of a batch are padded to it at most."""
    chunks = run.task.train_dataset.data.column("input_ids").chunks
    longest = [int(chunk.value_lengths().to_numpy(zero_copy_only=False).max()) for chunk in chunks if len(chunk)]
    return min([run.task.max_length, *([max(longest)] if longest else [])])
