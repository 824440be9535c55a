"""The planned peak of a run, said before it starts, and the measured one to hold against it when it is over."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest
from slivertune.training.assemble import Run
from slivertune.training.output.largest_batch import BatchSize
from slivertune.training.output.plan_process import plan_in_process
from slivertune.training.planned_request import plan_request


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


def batch_of(request: PlanRequest) -> BatchSize:
    """The batch that a plan is made for; all its rows are full.

    Args:
        request: The run.
    """
    return BatchSize(num_rows=request.batch_size, num_tokens=request.seq_length)


def request_of(run: Run) -> PlanRequest:
    """What to plan for a run.

    Args:
        run: Ready to start.

    Raises:
        ValueError: If the run has settings that a plan has no word for.
    """
    return plan_request(run.arguments, run.trainer, run.task, run.layout, is_chunked=run.loss is not None)
