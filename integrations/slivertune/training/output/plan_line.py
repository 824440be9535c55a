"""The planned peak of a run, said before it starts, and the measured one to hold against it when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.planning.make import make_plan
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest, PrecisionName
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.checks import enum_value
from slivertune.training.options.parse import TrainArguments
from slivertune.training.output.plan_process import plan_in_process
from slivertune.training.ready import Run

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The planned and the measured peak on the device, in bytes; None for what there is not."""

    planned: int | None
    measured: int | None


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


class PlanLine:
    """Plans a run that is ready to start, says so, and compares in the end. No failure of a plan breaks a run.

    With `--memory_ledger off` nothing is planned or measured.

    Args:
        run: Not yet training.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        # The figures are the first rank's, and so is what is said.
        self._is_on = run.arguments.run.memory_ledger != "off" and run.coordinator.is_first
        self._device_peak = DevicePeak()
        self.plan = self._make() if self._is_on else None
        """What was planned; None where nothing is, or can be."""
        if self._is_on:
            run.trainer.add_callback(self._device_peak)

    def peaks(self) -> Peaks:
        """Both peaks, when the run is over: on CUDA what the allocator had, elsewhere what the ledger counted."""
        ledger = self._run.ledger
        counted = None if ledger is None or ledger.peak is None else ledger.peak.device
        measured = counted if self._device_peak.num_bytes is None else self._device_peak.num_bytes
        return Peaks(planned=None if self.plan is None else self.plan.peak_bytes, measured=measured)

    def _make(self) -> Plan | None:
        say = self._run.display.say
        try:
            request = request_of(self._run)
            plan = _plan(request, self._run.source.config)
        # Whatever a plan stumbles over, the run may do.
        except Exception as error:
            say(f"  memory  not planned: {' '.join(str(error).split()) or type(error).__name__}")
            return None
        say(_line(plan))
        return plan


def _plan(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    if dist.is_available() and dist.is_initialized():
        return plan_in_process(request, config)
    # A plan builds a model, whose initial weights must not move the run's random state.
    with torch.random.fork_rng(devices=[]):
        return make_plan(request, config)


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
    _check(arguments)
    _check_layout(run)
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
        "chunked_cross_entropy": run.loss is not None,
        "token_ratio": arguments.tokens.token_ratio,
        "load_in_4bit": arguments.model.load_in_4bit,
    }
    if run.task.num_labels is not None:
        settings["num_labels"] = run.task.num_labels
    if not run.method.is_optimizer:
        settings["optimizer"] = _optimizer(arguments)
    return PlanRequest(**settings, **run.method.plan_settings(settings["precision"]))


def _check(arguments: TrainArguments) -> None:
    if arguments.data.task == "prompt_classification":
        raise ValueError("a plan knows causal_lm and classification, not prompt_classification")
    if arguments.training.torch_compile:
        raise ValueError("a plan can't see into what torch.compile makes")
    others = [f"--{name}" for name in arguments.method.not_planned if name in arguments.given]
    if others:
        raise ValueError(f"a plan has no word for {', '.join(others)}")


def _check_layout(run: Run) -> None:
    if run.layout != "single" and not run.method.is_planned_on_ranks:
        planned = " and ".join(name for name, method in TRAIN_METHODS.items() if method.is_planned_on_ranks)
        raise ValueError(
            f"on several GPUs this line knows {planned}; for {run.method.name} see slivertune plan --layout"
        )


def _optimizer(arguments: TrainArguments) -> OptimizerName:
    optim = enum_value(arguments.training.optim)
    if optim not in _OPTIMIZERS:
        raise ValueError(f"a plan does not know --optim {optim}, but {', '.join(_OPTIMIZERS)}")
    name = _OPTIMIZERS[optim]
    has_momentum = name == "sgd" and "momentum=" in (arguments.training.optim_args or "")
    return "sgd_momentum" if has_momentum else name


def _precision(run: Run) -> PrecisionName:
    """From what the weights are really held in: `--weights_dtype auto` may follow the checkpoint."""
    model: Any = run.trainer.model
    if all(parameter.dtype != torch.bfloat16 for parameter in model.parameters()):
        return "fp32" if run.arguments.precision.autocast == "no" else "mixed"
    return "mixed_hi" if run.method.keeps_masters else "bf16"


def _longest_row(run: Run) -> int:
    """Tokens of the longest row that is trained on; rows of a batch are padded to it at most."""
    chunks = run.task.train_dataset.data.column("input_ids").chunks
    longest = [int(chunk.value_lengths().to_numpy(zero_copy_only=False).max()) for chunk in chunks if len(chunk)]
    return min([run.task.max_length, *([max(longest)] if longest else [])])


def _line(plan: Plan) -> str:
    peak, request = plan.peak, plan.request
    parts = {
        "weights": peak.parameters,
        "gradients": peak.gradients,
        "state": peak.state,
        "activations and other": peak.residual,
    }
    listed = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in parts.items())
    return (
        f"  memory  {plan.peak_bytes / 1e6:,.1f} MB planned at the peak ({listed}), for {request.batch_size} x "
        f"{request.seq_length} tokens"
    )
