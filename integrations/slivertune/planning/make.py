"""A plan from a request: the real step of every distinct group, on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from slivertune.core.layout import Layout
from slivertune.core.ledger import Census, Ledger
from slivertune.hift.groups import Group
from slivertune.planning.fake import FakeOverrides, without_data
from slivertune.planning.four_bit import num_weights, parameter_bytes
from slivertune.planning.hift_run import HiFTRun, alike
from slivertune.planning.layouts import sizes_of, spread
from slivertune.planning.model import attached, build_model, give_sizes, make_batch
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.plan import GroupPlan, Moment, Phase, Plan
from slivertune.planning.request import PlanRequest
from slivertune.planning.sft_run import SFTRun
from slivertune.planning.sft_sizes import without_kept_tensors
from slivertune.planning.stand_ins import standing_in
from slivertune.planning.step import Forward, GradientMeter, StepPeak, autocast_of, largest_of, measure_step


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
            forward = _forward_of(model, request)
            if request.method == "hift":
                return _plan_hift(request, model, forward, shared.layout)
            if request.method == "sft":
                return _plan_sft(request, model, forward)
            return _plan_whole(request, model, forward)


def _forward_of(model: Any, request: PlanRequest) -> Forward:
    batch = make_batch(request)

    def forward() -> torch.Tensor:
        with autocast_of(request.has_autocast):
            loss: torch.Tensor = model(**batch).loss
        return loss

    return forward


def _plan_hift(request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> Plan:
    run = HiFTRun(model, request, is_shared=layout not in ("single", "ddp"))
    groups, host = [], {}
    with attached(request, model) as notes:
        for members in alike(run.groups, model):
            peak = run.measure(members[0], forward)
            if layout == "fsdp2" and len(members) > 1:
                # Under the lowest block lies the embedding, so that it alone is not worked on while a block is on its
                # way.
                peak = _higher_before_step(peak, run.measure(members[1], forward))
            masters, others = run.state_bytes(members[0])
            groups.append(_group_plan(members, run, peak, masters, others))
            host[members[0].index] = peak.after.host * len(members)
    waiting = sum(host.values())
    if request.state == "device":
        groups = _with_state_of_others(groups, run)
    return _plan(
        request,
        model,
        groups,
        host_bytes=0 if request.state == "disk" else waiting,
        disk_bytes=waiting if request.state == "disk" else 0,
        notes=notes,
    )


def _higher_before_step(first: StepPeak, second: StepPeak) -> StepPeak:
    return replace(first, before_step=max(first.before_step, second.before_step, key=lambda census: census.device))


def _group_plan(members: Sequence[Group], run: HiFTRun, peak: StepPeak, masters: int, others: int) -> GroupPlan:
    group = members[0]
    return GroupPlan(
        index=group.index,
        indices=tuple(member.index for member in members),
        name=", ".join(layer.name for layer in group.layers),
        num_parameters=sum(parameter.numel() for parameter in run.parameters_of(group)),
        gradient_bytes=run.gradient_bytes(group),
        state_bytes=others,
        master_bytes=masters,
        peak=_moment(group.index, peak),
        activation_bytes=peak.activations,
        before_step=_before_step(group.index, peak),
    )


def _with_state_of_others(groups: Sequence[GroupPlan], run: HiFTRun) -> list[GroupPlan]:
    """Add what stays on the device of the groups whose turn it is not."""
    total = sum((group.state_bytes + group.master_bytes) * len(group.indices) for group in groups)
    return [
        replace(
            group, peak=replace(group.peak, state=group.peak.state + total - group.state_bytes - group.master_bytes)
        )
        for group in groups
    ]


def _plan_whole(request: PlanRequest, model: nn.Module, forward: Forward) -> Plan:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    meter = GradientMeter(model)
    optimizer_class, arguments = optimizer_of(request.optimizer)
    with FakeOverrides():
        optimizer = optimizer_class(trained, **arguments)
    with attached(request, model) as notes, Ledger(model) as ledger:
        # The first step makes the state, all later ones have it from their beginning.
        peak = largest_of(
            [measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards) for _ in range(2)]
        )
    group = GroupPlan(
        index=0,
        indices=(0,),
        name="all",
        num_parameters=sum(parameter.numel() for parameter in trained),
        gradient_bytes=meter.bytes_of(trained),
        state_bytes=_tensor_bytes(optimizer),
        master_bytes=0,
        peak=_moment(0, peak),
        activation_bytes=peak.activations,
        before_step=_before_step(0, peak),
    )
    return _plan(request, model, [group], notes=notes)


def _plan_sft(request: PlanRequest, model: nn.Module, forward: Forward) -> Plan:
    with without_kept_tensors():
        run = SFTRun(model, request)
        with attached(request, model) as notes:
            inside, outside = run.measure(forward)
    num_parameters = num_weights(model) - sum(each.numel() for each in run.own_parameters)
    groups = []
    if inside is not None:
        groups.append(_sparse_group(0, "inside an estimation phase", run, inside, inside.highest.state))
    groups.append(_sparse_group(len(groups), "outside of estimation phases", run, outside, outside.after.state))
    plan = _plan(request, model, groups, notes=notes)
    stored = plan.parameter_bytes - sum(each.nbytes for each in run.own_parameters)
    return replace(plan, num_parameters=num_parameters, parameter_bytes=stored)


def _sparse_group(index: int, name: str, run: SFTRun, peak: StepPeak, state_bytes: int) -> GroupPlan:
    return GroupPlan(
        index=index,
        indices=(index,),
        name=name,
        num_parameters=run.optimizer.num_weights,
        gradient_bytes=peak.gradients,
        state_bytes=state_bytes,
        master_bytes=0,
        peak=_moment(index, peak),
        activation_bytes=peak.activations,
        before_step=_before_step(index, peak),
    )


def _tensor_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for values in optimizer.state.values() for value in values.values()]
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _moment(group: int, peak: StepPeak) -> Moment:
    return _moment_of(group, peak.phase, peak.census)


def _before_step(group: int, peak: StepPeak) -> Moment:
    return _moment_of(group, "forward" if peak.phase == "forward" else "backward", peak.before_step)


def _moment_of(group: int, phase: Phase, census: Census) -> Moment:
    return Moment(
        group=group,
        phase=phase,
        parameters=census.parameters,
        gradients=census.gradients,
        state=census.state,
        residual=census.residual,
    )


def _plan(
    request: PlanRequest,
    model: nn.Module,
    groups: Sequence[GroupPlan],
    *,
    notes: tuple[str, ...],
    host_bytes: int = 0,
    disk_bytes: int = 0,
) -> Plan:
    peak = max((group.peak for group in groups), key=lambda moment: moment.total)
    largest = max(groups, key=lambda group: group.num_parameters)
    num_parameters = num_weights(model)
    stored = parameter_bytes(model)
    copies = 2 * num_parameters if request.precision == "mixed" else 0
    return Plan(
        request=request,
        peak=peak,
        groups=tuple(groups),
        num_parameters=num_parameters,
        num_trainable_peak=largest.num_parameters,
        parameter_bytes=stored + copies + largest.master_bytes,
        gradient_bytes=largest.gradient_bytes,
        state_bytes=largest.state_bytes,
        residual_bytes=peak.residual,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        notes=notes,
    )
