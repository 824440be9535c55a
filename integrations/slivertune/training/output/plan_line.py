"""Planned peak memory of a run, printed before it starts."""

import torch
import torch.distributed as dist

from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest
from slivertune.training.assemble import Run
from slivertune.training.output.largest_batch import BatchSize
from slivertune.training.output.plan_process import plan_in_process
from slivertune.training.planned_request import plan_request


def plan_run(run: Run) -> Plan | None:
    """Plan a run that is ready to start, and print the plan. A plan that fails never breaks a run.

    Args:
        run: Run that is not training yet.

    Returns:
        The plan, or None if it failed.
    """
    say = run.display.say
    try:
        request = request_of(run)
        if dist.is_available() and dist.is_initialized():
            plan = plan_in_process(request, run.source.config)
        else:
            # A plan builds a model, whose initialization must not change the run's random state.
            with torch.random.fork_rng(devices=[]):
                plan = make_plan(request, run.source.config)
    # An error in a plan must not stop the run.
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
    """Return the batch for which a plan is made. All its rows are full.

    Args:
        request: Request for the plan.
    """
    return BatchSize(num_rows=request.batch_size, num_tokens=request.seq_length)


def request_of(run: Run) -> PlanRequest:
    """Make the plan request of a run.

    Args:
        run: Run that is ready to start.

    Raises:
        ValueError: If the run has settings that a plan can't express.
    """
    return plan_request(run.arguments, run.trainer, run.task, run.layout, is_chunked=run.loss is not None)
