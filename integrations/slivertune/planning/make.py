"""A plan from a request: the real step of every distinct group, on tensors without data."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from slivertune.planning.fake import without_data
from slivertune.planning.four_bit import num_weights, parameter_bytes
from slivertune.planning.layouts import sizes_of, spread
from slivertune.planning.methods import MeasuredSteps, planned
from slivertune.planning.model import build_model, give_sizes, make_batch
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest
from slivertune.planning.stand_ins import standing_in
from slivertune.planning.step import Forward, autocast_of


def make_plan(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    """Find out what a run needs, by running its steps on tensors without data.

    Costs seconds and a few hundred megabytes, whatever the size of the model.

    Args:
        request: The run.
        config: The model's configuration.

    Returns:
        The plan, without any allowance.

    Raises:
        ValueError: If the method does not fit the model, or the model can't be run without data.
    """
    if request.layout != "single":
        alone = replace(request, layout="single", num_gpus=1, offload_parameters=False)
        if request.layout in ("fsdp2", "zero3"):
            # The head's weight is gathered for the head's own forward alone, so that training computes all logits.
            alone = replace(alone, chunked_cross_entropy=False)
        sizes = sizes_of(build_model(request, config))
        return spread(_plan_of_one(alone, config, request, sizes.bucket_elements), request, sizes)
    return _plan_of_one(request, config, request)


def _plan_of_one(request: PlanRequest, config: PreTrainedConfig, shared: PlanRequest, bucket_elements: int = 0) -> Plan:
    model = build_model(request, config)
    with without_data():
        give_sizes(model)
        with standing_in(shared, model, bucket_elements):
            steps = planned(request.method).measure(request, model, _forward_of(model, request), shared.layout)
            return _plan(request, model, steps)


def _forward_of(model: Any, request: PlanRequest) -> Forward:
    batch = make_batch(request)

    def forward() -> torch.Tensor:
        with autocast_of(request.has_autocast):
            loss: torch.Tensor = model(**batch).loss
        return loss

    return forward


def _plan(request: PlanRequest, model: nn.Module, steps: MeasuredSteps) -> Plan:
    peak = max((group.peak for group in steps.groups), key=lambda moment: moment.total)
    largest = max(steps.groups, key=lambda group: group.num_parameters)
    own_bytes = sum(each.nbytes for each in steps.own_parameters)
    num_own = sum(each.numel() for each in steps.own_parameters)
    num_parameters = num_weights(model)
    copies = 2 * num_parameters if request.precision == "mixed" else 0
    return Plan(
        request=request,
        peak=peak,
        groups=tuple(steps.groups),
        num_parameters=num_parameters - num_own,
        num_trainable_peak=largest.num_parameters,
        parameter_bytes=parameter_bytes(model) - own_bytes + copies + largest.master_bytes,
        gradient_bytes=largest.gradient_bytes,
        state_bytes=largest.state_bytes,
        residual_bytes=peak.residual,
        host_bytes=steps.host_bytes,
        disk_bytes=steps.disk_bytes,
        notes=steps.notes,
    )
