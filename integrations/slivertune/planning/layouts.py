"""Memory of runs on several GPUs, from sizes: the bytes that an engine adds to one GPU's step, and those it shards.

Engines can't run on fake tensors, so this module computes with the plan of one GPU. P is the bytes of all parameters, G
of the gradients that a step makes, S of their optimizer state with fp32 master weights, and N the number of ranks:

* `ddp`, and SFT under `zero1` and `zero2`: all bytes of one GPU, and the buckets in which gradients are averaged.
  HiFT's buckets are part of the measured step.
* `zero1`, `zero2`: P, the gradients, S / N while the group trains, a reduce bucket in the backward, and in the step the
  rank's share of the gradients in fp32.
* `zero3`: (P + G + S) / N, a reduce bucket, and the gathered weights, of which up to 1e9 stay gathered.
* `fsdp2`: P / N and the chunks of state. Gathered and reduced tensors are part of the measured step.

If parameters are offloaded, P is in host memory. Under FSDP2, whose optimizer then steps on the host, so are G and S.

A stand-in on the model makes a layout's allocations during a backward, at the moments when the engine makes them. Our
own buckets are real, but without other ranks. The ledger counts all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slivertune.core.layers import find_layers
from slivertune.core.ledger import claimed_at_birth
from slivertune.core.torch_internals import at_end_of_backward
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.planning.gathered_units import GatheredUnits, can_be_shared
from slivertune.planning.methods import planned
from slivertune.planning.plan import GroupPlan, Moment, Phase, Plan
from slivertune.planning.request import PlanRequest
from slivertune.sft.gradient_sync import BUCKET_ELEMENTS

_MOST_LIVE_ELEMENTS = 10**9
"""Number of weights that ZeRO-3 keeps gathered for their next use, unless its configuration says otherwise
(stage3_max_live_parameters and stage3_max_reuse_distance)."""
_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of a model's layers, with weights in the dtype in which they are stored."""

    largest: int
    """Bytes of the largest layer: embedding, block or head."""
    largest_block: int
    """Bytes of the largest block."""
    outside_blocks: int
    """Bytes of embedding and head together."""
    bucket_elements: int
    """Elements of ZeRO's reduce bucket if the configuration says "auto": the hidden size, squared."""
    itemsize: int
    """Bytes per weight, in the widest dtype."""
    looked_up: int
    """Bytes of the input embedding, which is not needed after the tokens' look-up, or 0 if it is tied to the head."""
    stored: int
    """Bytes of all weights and buffers."""
    shared: int
    """Bytes of all weights that FSDP2 shards."""


def sizes_of(model: Any) -> LayerSizes:
    """Measure a model's layers.

    Args:
        model: A transformers model, or a PEFT model around one; on any device.
    """
    named = dict(model.named_parameters())
    layers = find_layers(model)
    num_bytes = [sum(named[name].nbytes for name in layer.parameter_names) for layer in layers]
    blocks = [size for layer, size in zip(layers, num_bytes, strict=True) if layer.kind == "block"]
    bottom, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return LayerSizes(
        largest=max(num_bytes),
        largest_block=max(blocks, default=0),
        outside_blocks=sum(num_bytes) - sum(blocks),
        bucket_elements=int(getattr(model.config, "hidden_size", 0) or 0) ** 2,
        itemsize=max(parameter.itemsize for parameter in named.values()),
        looked_up=0 if head is not None and head.weight is bottom else bottom.nbytes,
        stored=sum(each.nbytes for each in (*named.values(), *model.buffers())),
        shared=sum(parameter.nbytes for parameter in named.values() if can_be_shared(parameter)),
    )


def spread(plan: Plan, request: PlanRequest, sizes: LayerSizes) -> Plan:
    """Convert the plan of a run on one GPU into the plan of the same run on several GPUs.

    Args:
        plan: Plan of the run on one GPU.
        request: Run whose layout is not `single`.
        sizes: Sizes of the model's layers.

    Returns:
        The plan of each GPU, and of its process on the host.
    """
    groups = tuple(_spread_group(group, plan, request, sizes) for group in plan.groups)
    peak = max((group.peak for group in groups), key=lambda moment: moment.total)
    return replace(
        plan,
        request=request,
        groups=groups,
        peak=peak,
        residual_bytes=peak.residual,
        host_bytes=_host_bytes(plan, request, sizes),
        notes=(*plan.notes, f"memory that layout {request.layout!r} adds and shards is computed from sizes"),
    )


def _spread_group(group: GroupPlan, plan: Plan, request: PlanRequest, sizes: LayerSizes) -> GroupPlan:
    method = planned(request.method)
    if request.layout == "ddp" or (method.steps_itself and request.layout in ("zero1", "zero2")):
        if method.averages_in_buckets:
            # The measured step had its buckets.
            return group
        # SFT's last group is outside of estimation phases.
        moments = [_with_buckets(group, request, is_estimating=group is not plan.groups[-1])]
    elif request.layout == "fsdp2":
        moments = _fsdp2_moments(group, request, sizes)
    elif request.layout == "zero3":
        moments = _zero3_moments(group, request, sizes)
    else:
        moments = _zero_moments(group, request)
    return replace(group, peak=max(moments, key=lambda moment: moment.total))


def _with_buckets(group: GroupPlan, request: PlanRequest, *, is_estimating: bool) -> Moment:
    """Add buckets: torch copies all gradients permanently, SFT its few after a backward (also under ZeRO)."""
    if not planned(request.method).steps_itself:
        return replace(group.peak, residual=group.peak.residual + group.gradient_bytes)
    # Inside a phase, about as many candidates as deltas have gradients, too. Outside there are no candidates.
    copied = min((2 if is_estimating else 1) * group.gradient_bytes, BUCKET_ELEMENTS * _FP32)
    return max(
        group.peak,
        _moment(group, "backward", _before_step(group).parameters, group.gradient_bytes + copied, group.state_bytes),
        key=lambda moment: moment.total,
    )


def _zero_moments(group: GroupPlan, request: PlanRequest) -> list[Moment]:
    """Return the moments of ZeRO-1 and 2: whole weights, and sharded state on the device while the group trains."""
    ranks = request.num_gpus
    state = math.ceil(_zero_state_bytes(group) / ranks)
    # The step has the rank's share of the gradients, and a flat copy of it.
    return [
        # The measured step had the reduce bucket.
        replace(_before_step(group), state=state),
        _moment(
            group,
            "step",
            group.peak.parameters,
            2 * math.ceil(group.gradient_bytes / ranks),
            state,
            _fp32_gradients(group, ranks),
        ),
    ]


def _zero3_moments(group: GroupPlan, request: PlanRequest, sizes: LayerSizes) -> list[Moment]:
    """Return the moments of ZeRO-3. It shards all, and gathers a layer and the next, which stay for their next use."""
    ranks, weights = request.num_gpus, group.peak.parameters
    own = 0 if request.offload_parameters else math.ceil(weights / ranks)
    gathered = min(weights, max(sizes.largest + sizes.largest_block, _MOST_LIVE_ELEMENTS * sizes.itemsize))
    if planned(request.method).steps_itself:
        # Every rank has whole vectors, and ZeRO has no bucket. The method trains no embedding, which is released early.
        return [replace(_before_step(group), parameters=own + min(gathered, weights - sizes.looked_up))]
    state, gradients = math.ceil(_zero_state_bytes(group) / ranks), math.ceil(group.gradient_bytes / ranks)
    return [
        _moment(
            group,
            "backward",
            own + gathered,
            gradients,
            state,
            group.activation_bytes + (sizes.bucket_elements * sizes.itemsize),
        ),
        _moment(group, "step", own, gradients, state, _fp32_gradients(group, ranks)),
    ]


def _fsdp2_moments(group: GroupPlan, request: PlanRequest, sizes: LayerSizes) -> list[Moment]:
    """Return the moments of FSDP2. The measured step had gathered weights, whole gradients and their reduction."""
    ranks, offloads, method = request.num_gpus, request.offload_parameters, planned(request.method)
    own = sizes.stored - sizes.shared + (0 if offloads else math.ceil(sizes.shared / ranks))
    resident_state = 0
    if method.steps_itself:
        resident_state = group.peak.state  # vectors and indices are whole on every rank
    elif not method.waits_on_host(request):
        resident_state = 0 if offloads else math.ceil(group.peak.state / ranks)
    before = _before_step(group)
    moments = [replace(before, parameters=before.parameters - sizes.stored + own, state=resident_state)]
    if not offloads:
        moving = resident_state
        if method.waits_on_host(request):
            whole = math.ceil(group.state_and_master_bytes / ranks)
            moving = min(2 * request.stream_bytes, whole) if request.stream_bytes else whole
        gradients = math.ceil(group.gradient_bytes / ranks)
        # State begins to load once the first gradients are reduced. The layer below was gathered without need.
        reduced = min(group.gradient_bytes, max(sizes.largest, sizes.outside_blocks))
        moments.append(_moment(group, "backward", own + sizes.largest_block, gradients + reduced, moving))
        moments.append(_moment(group, "step", own, gradients, moving))
    return moments


def _before_step(group: GroupPlan) -> Moment:
    return group.before_step or group.peak


def _moment(group: GroupPlan, phase: Phase, parameters: int, gradients: int, state: int, residual: int = 0) -> Moment:
    return Moment(
        group=group.index, phase=phase, parameters=parameters, gradients=gradients, state=state, residual=residual
    )


def _zero_state_bytes(group: GroupPlan) -> int:
    """Return the bytes of state with fp32 masters, which ZeRO keeps for weights of any dtype that train."""
    return group.state_bytes + group.num_parameters * _FP32


def _fp32_gradients(group: GroupPlan, ranks: int) -> int:
    return math.ceil(group.num_parameters * _FP32 / ranks)


def _host_bytes(plan: Plan, request: PlanRequest, sizes: LayerSizes) -> int:
    """Return the bytes that each process keeps in host memory. Activations are not sharded."""
    ranks, activations = request.num_gpus, max(group.host_activation_bytes for group in plan.groups)
    state = plan.host_bytes - activations
    if request.layout == "ddp":
        return plan.host_bytes
    if request.layout == "fsdp2":
        waiting = activations + math.ceil(state / ranks)
        if not request.offload_parameters:
            return waiting
        on_device = 0 if state else sum(group.state_bytes * len(group.indices) for group in plan.groups)
        gradients = max(group.gradient_bytes for group in plan.groups)
        return waiting + math.ceil((sizes.stored + gradients + on_device) / ranks)
    waiting = 0
    if planned(request.method).waits_on_host(request):
        waiting = sum(_zero_state_bytes(group) * len(group.indices) for group in plan.groups)
    return activations + math.ceil((waiting + (sizes.stored if request.offload_parameters else 0)) / ranks)


class _NoOtherRank:
    """Handle of an average over one rank, which takes no memory."""

    def wait(self) -> None:
        """Return at once, since nothing is in flight."""


class _KeepsInput(torch.autograd.Function):
    """Passes an output through, and saves an input for as long as the backward may need it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _keep_input(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = _KeepsInput.apply
    return apply(output, inputs[0].detach()) if inputs and output.requires_grad else output


def _watch_reduce_bucket(model: nn.Module, num_elements: int, stack: ExitStack) -> None:
    """Allocate the reduce bucket of ZeRO-1 and 2 from the first gradient of a backward to its end."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buckets: list[torch.Tensor] = []

    def arrived(parameter: torch.Tensor) -> None:
        if not buckets:
            at_end_of_backward(buckets.clear)
            with claimed_at_birth("gradients"):
                buckets.append(torch.empty(num_elements, dtype=trained[0].dtype))

    for each in trained:
        stack.callback(each.register_post_accumulate_grad_hook(arrived).remove)


def averaged_in_buckets(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    on_mean: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> BucketedAllReduce:
    """Let a model's gradients pass through buckets, as if they were averaged over ranks.

    Args:
        model: The model.
        parameters: Its parameters, in the order that ranks have.
        on_mean: Function to call with each parameter whose gradient has passed.
    """
    alone, nothing = Heartbeat("planning"), _NoOtherRank()
    return BucketedAllReduce(model, parameters, alone, on_mean=on_mean, start_mean=lambda flat: nothing)


@contextmanager
def standing_in(request: PlanRequest, model: nn.Module, bucket_elements: int) -> Iterator[None]:
    """Attach the stand-in of a layout's engine to a model inside this context.

    Args:
        request: Run with the layout and the method.
        model: Model to attach it to.
        bucket_elements: Elements of ZeRO's reduce bucket.
    """
    method, layout = planned(request.method), request.layout
    with ExitStack() as stack:
        if layout == "fsdp2":
            stack.callback(
                GatheredUnits(
                    model,
                    num_gpus=request.num_gpus,
                    num_backwards=request.num_backwards,
                    offloads=request.offload_parameters,
                ).remove
            )
        elif layout == "zero3":
            # ZeRO-3's matrix products save their inputs, also for frozen weights.
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_hook(_keep_input).remove)
        # An optimizer that steps in the backward is told of each mean, and its run attaches the buckets.
        elif layout != "single" and method.averages_in_buckets and request.gradients != "stepped":
            if layout == "ddp" or method.steps_itself:
                stack.callback(averaged_in_buckets(model, model.parameters()).remove)
            else:
                _watch_reduce_bucket(model, bucket_elements, stack)
        yield
