"""Planned time of an update on a GPU, its work and disk writes, and the rates that are assumed."""

from dataclasses import dataclass, replace
from typing import Any

from slivertune.core.peak_memory import MARGIN_SHARE
from slivertune.planning.cards import Rates
from slivertune.planning.methods import planned
from slivertune.planning.plan import MemoryRequirement, Plan
from slivertune.planning.step_work import UpdateWork, Work
from slivertune.planning.time_formula import MeanUpdate, disk_bytes_per_update, mean_update

EFFICIENCIES = (0.3, 0.9)
"""Shares of the peak that slow and fast training reach. A plan's seconds lie in between."""
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTime:
    """Time and work of an update, as means over the whole run."""

    rates: Rates
    """Rates of the GPU that training is assumed to reach."""
    update: MeanUpdate
    """Seconds of one GPU, by part."""
    seconds_range: tuple[float, float]
    """Seconds per update at the two `EFFICIENCIES`."""
    num_tokens: int
    """Tokens per update on all GPUs."""
    weight_share: float
    """Share of the tokens from which each trained weight learns: those of its turns, and of these the selected ones."""
    flops: float
    """Floating-point operations per update on one GPU, recomputation included."""
    num_operators: float
    """Operators that Python issues per update."""
    disk_bytes_per_update: float
    """Bytes written to files per update. As many are read."""

    @property
    def seconds(self) -> float:
        """Seconds per update, from its first forward to the first forward of the next."""
        return self.update.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s on all GPUs."""
        return self.num_tokens / self.seconds

    @property
    def weight_tokens_per_second(self) -> float:
        """Tokens/s that each trained weight learns from."""
        return self.tokens_per_second * self.weight_share

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Tokens/s on all GPUs, at the two `EFFICIENCIES`."""
        slow, fast = self.seconds_range
        return self.num_tokens / slow, self.num_tokens / fast

    @property
    def disk_bytes_per_hour(self) -> float:
        """Bytes written to files per hour."""
        return self.disk_bytes_per_update / self.seconds * _HOUR

    def hours(self, num_tokens: float) -> float:
        """Return the hours that a run takes.

        Args:
            num_tokens: Tokens of the run on all GPUs together.
        """
        return num_tokens / self.tokens_per_second / _HOUR

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "seconds_per_update": self.seconds,
            "computing_seconds": dict(self.update.computing),
            "waiting_seconds": dict(self.update.waiting),
            "tokens_per_second": self.tokens_per_second,
            "weight_tokens_per_second": self.weight_tokens_per_second,
            "tokens_per_update": self.num_tokens,
            "flops_per_update": self.flops,
            "operators_per_update": self.num_operators,
            "disk_bytes_written_per_hour": self.disk_bytes_per_hour,
            "range": {"efficiency": list(EFFICIENCIES), "tokens_per_second": list(self.tokens_per_second_range)},
            "rates": {
                "flops": self.rates.flops,
                "efficiency": self.rates.efficiency,
                "memory_bandwidth": self.rates.memory_bandwidth,
                "cache_bandwidth": self.rates.cache_bandwidth,
                "bus_bandwidth": self.rates.bus_bandwidth,
                "link_bandwidth": self.rates.link_bandwidth,
                "disk_bandwidth": self.rates.disk_bandwidth,
            },
        }


def plan_time(plan: Plan, rates: Rates) -> PlannedTime:
    """Compute the time of a planned run's updates.

    Args:
        plan: Plan of the run.
        rates: Rates of the GPU.
    """
    request = plan.request
    work = [(update.share, _all_work(update, request.gradient_accumulation_steps)) for update in plan.updates]
    slow, fast = (mean_update(plan, rates.at(efficiency)).seconds for efficiency in EFFICIENCIES)
    return PlannedTime(
        rates=rates,
        update=mean_update(plan, rates),
        seconds_range=(slow, fast),
        num_tokens=request.batch_size * request.seq_length * request.gradient_accumulation_steps * request.num_gpus,
        weight_share=(1.0 if request.token_ratio is None else request.token_ratio) / plan.num_groups,
        flops=sum(share * each.flops for share, each in work),
        num_operators=sum(share * each.num_operators for share, each in work),
        disk_bytes_per_update=disk_bytes_per_update(plan),
    )


def _all_work(update: UpdateWork, num_micro_batches: int) -> Work:
    return update.forward(num_micro_batches) + update.backward(num_micro_batches) + update.step


def with_room_ahead(requirement: MemoryRequirement, device_bytes: int) -> Plan:
    """Return the plan with HiFT's default prefetching: into the memory that is left, less its margin.

    Args:
        requirement: Memory that the run requires without prefetching.
        device_bytes: Memory of the GPU, in bytes.
    """
    plan, request = requirement.plan, requirement.plan.request
    has_budget = request.device_bytes is not None
    if has_budget or not planned(request.method).waits_on_host(request) or request.layout not in ("single", "ddp"):
        return plan
    room = room_ahead(requirement, device_bytes, device_bytes)
    return replace(plan, request=replace(request, prefetch_bytes=max(request.prefetch_bytes or 0, room)))


def room_ahead(requirement: MemoryRequirement, limit_bytes: int, memory_bytes: int) -> int:
    """Return the bytes into which HiFT prefetches by default: the memory that is left, less its margin.

    Args:
        requirement: Memory that the run requires without prefetching.
        limit_bytes: Bytes of the GPU that the run may fill.
        memory_bytes: Bytes of the whole GPU, of which the margin is a share.
    """
    return max(0, limit_bytes - requirement.device_bytes - memory_bytes // MARGIN_SHARE)
