"""Time that an update spends on collectives and on offloaded weights, from their sizes and the engine's rules.

N is the number of GPUs. In a ring, each GPU sends (N - 1) / N of the bytes of an all-gather or a reduce-scatter, and
twice that for an all-reduce. Collectives overlap with the computation of their phase if the engine starts them during
that phase. The update waits for the rest.
"""

from dataclasses import dataclass
from typing import Literal

from slivertune.planning.cards import HOST_BANDWIDTH, Rates
from slivertune.planning.methods import planned
from slivertune.planning.plan import Phase, Plan
from slivertune.planning.request import PlanRequest

Reason = Literal["collectives", "weights from the host", "the host's update"]

_HOST_STEP_BYTES = 28
"""Bytes per parameter of AdamW on the host in fp32. It reads master, gradient and 2 moments, and writes all but the
gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owed:
    """Communication or host work in a phase of an update, beside the GPU's own work."""

    reason: Reason
    phase: Phase
    seconds: float
    """Seconds that it takes by itself."""
    window: float = 1.0
    """Share of the phase's computation with which it can overlap. It is 0 if it comes after the computation."""

    def waited_for(self, computing: float) -> float:
        """Return the seconds that remain when the computation of the phase is over.

        Args:
            computing: Seconds that the computation takes.
        """
        return max(0.0, self.seconds - self.window * computing)


def owed(plan: Plan, rates: Rates) -> list[Owed]:
    """List the collectives of an update, the copies of offloaded weights and the update on the host.

    Args:
        plan: Plan of one of the GPUs.
        rates: Rates of its card.
    """
    request = plan.request
    if request.layout == "single":
        return []
    rounds = request.gradient_accumulation_steps
    ring = (request.num_gpus - 1) / request.num_gpus / (rates.link_bandwidth or rates.bus_bandwidth)
    weights, gradients = _weight_bytes(plan), mean_gradient_bytes(plan)
    found: list[Owed] = []
    if request.layout in ("zero3", "fsdp2"):
        # Each forward and each backward gathers all weights. ZeRO-3 reduces the gradients in each backward, FSDP2 in
        # the last, since Accelerate turns its synchronisation off in the others.
        reductions = rounds if request.layout == "zero3" else 1
        gather, reduce = rounds * ring * weights, reductions * ring * gradients
        found += [
            Owed(reason="collectives", phase="forward", seconds=gather),
            Owed(reason="collectives", phase="backward", seconds=gather + reduce),
        ]
        if request.offload_parameters:
            found += _offloaded(plan, rates, weights)
    elif request.layout == "ddp" or planned(request.method).steps_itself:
        # One all-reduce of the accumulated gradients, under the last micro-batch's backward.
        found += [Owed(reason="collectives", phase="backward", seconds=2 * ring * gradients, window=1 / rounds)]
    else:
        reductions = rounds if request.layout == "zero2" else 1
        found += [
            Owed(
                reason="collectives",
                phase="backward",
                seconds=reductions * ring * gradients,
                window=reductions / rounds,
            ),
            Owed(reason="collectives", phase="step", seconds=ring * _trained_weight_bytes(plan), window=0),
        ]
    return [each for each in found if each.seconds > 0]


def _offloaded(plan: Plan, rates: Rates, weights: int) -> list[Owed]:
    """List the copies of offloaded weights, twice per micro-batch for each GPU's shard, and the update on the host.

    FSDP2 on one rank copies weights on the computing stream, so that nothing overlaps with the copies (torch 2.13,
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, lines 437 to 459).
    """
    request = plan.request
    rounds, part = request.gradient_accumulation_steps, 1 / request.num_gpus / rates.bus_bandwidth
    window = 0.0 if request.layout == "fsdp2" and request.num_gpus == 1 else 1.0
    seconds = rounds * part * weights
    found = [
        Owed(reason="weights from the host", phase="forward", seconds=seconds, window=window),
        Owed(reason="weights from the host", phase="backward", seconds=seconds, window=window),
    ]
    if not planned(request.method).steps_itself:
        seconds = _HOST_STEP_BYTES * mean_trained(plan) / request.num_gpus / HOST_BANDWIDTH
        found.append(Owed(reason="the host's update", phase="step", seconds=seconds, window=0))
    return found


def mean_gradient_bytes(plan: Plan) -> float:
    """Return the bytes of an update's gradients, in the mean over all updates."""
    return _mean(plan, [group.gradient_bytes for group in plan.groups])


def mean_trained(plan: Plan) -> float:
    """Return the number of elements that an update trains, in the mean over all updates."""
    return _mean(plan, [group.num_parameters for group in plan.groups])


def mean_state_bytes(plan: Plan) -> float:
    """Return the bytes of an update's master weights and optimizer state, in the mean over all updates."""
    return _mean(plan, [group.state_and_master_bytes for group in plan.groups])


def _mean(plan: Plan, values: list[int]) -> float:
    if not planned(plan.request.method).trains_in_groups:
        return values[-1]  # SFT's last kind of update is the usual one
    counts = [len(group.indices) for group in plan.groups]
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def _weight_bytes(plan: Plan) -> int:
    return plan.num_parameters * _itemsize(plan.request)


def _trained_weight_bytes(plan: Plan) -> float:
    return mean_trained(plan) * _itemsize(plan.request)


def _itemsize(request: PlanRequest) -> int:
    return 2 if request.has_bf16_weights else 4
