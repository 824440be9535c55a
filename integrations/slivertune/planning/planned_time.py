"""How long an update takes: its recorded schedule played on a card, and what several GPUs owe each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from slivertune.hift.disk import NUM_BUFFERS, groups_on_disk
from slivertune.hift.prefetch import MARGIN_SHARE
from slivertune.planning.cards import Rates
from slivertune.planning.collectives import Owed, mean_state_bytes, owed
from slivertune.planning.methods import planned
from slivertune.planning.plan import MemoryRequirement, Plan
from slivertune.planning.recorded_run import record_schedule
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Begin, Cost, Entry, Phase, Schedule, Transfer, Work
from slivertune.planning.schedule_player import UpdateTime, mean_update

PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTime:
    """What an update takes, in the mean over all of a run."""

    rates: Rates
    """Of the card, as they are taken to be reached."""
    update: UpdateTime
    """One GPU's own work, and its waits for copies."""
    owed: Sequence[Owed]
    """What goes on beside it."""
    num_tokens: int
    """That an update trains on, on all GPUs."""
    flops: float
    """Floating-point operations of an update on one GPU, those of recomputation included."""
    disk_bytes_per_update: float
    """That are written to files, and as many read."""
    copied: str = "masters and state"
    """What goes to the host and comes back."""

    @property
    def computing(self) -> dict[str, float]:
        """Seconds of an update in which a GPU computes, by phase."""
        still: dict[str, float] = {}
        for (phase, _), seconds in self.update.exposed_by.items():
            still[phase] = still.get(phase, 0.0) + seconds
        return {phase: self.update.seconds.get(phase, 0.0) - still.get(phase, 0.0) for phase in PHASES}

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of an update in which a GPU's computation stands still, by what for."""
        waits: dict[str, float] = {}
        if self.update.exposed > 0:
            waits[f"copies of {self.copied}"] = self.update.exposed
        for each in self.owed:
            seconds = each.waited_for(self.update.seconds.get(each.phase, 0.0))
            if seconds > 0:
                waits[each.reason] = waits.get(each.reason, 0.0) + seconds
        # A group is read into the buffer from which another was written, all under the updates meanwhile.
        moving = (2 if self.rates.disk_duplex == "half" else 1) * self.disk_bytes_per_update / self.rates.disk_bandwidth
        if (seconds := moving - sum(self.computing.values()) - sum(waits.values())) > 0:
            waits["the disk"] = seconds
        return waits

    @property
    def seconds(self) -> float:
        """Of an update, from its first forward to the next one's."""
        return sum(self.computing.values()) + sum(self.waits.values())

    @property
    def tokens_per_second(self) -> float:
        """On all GPUs."""
        return self.num_tokens / self.seconds

    @property
    def disk_bytes_per_hour(self) -> float:
        """That are written to files."""
        return self.disk_bytes_per_update / self.seconds * _HOUR

    def hours(self, num_tokens: float) -> float:
        """How long a run takes.

        Args:
            num_tokens: That it trains on, on all GPUs together.
        """
        return num_tokens / self.tokens_per_second / _HOUR

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "seconds_per_update": self.seconds,
            "computing_seconds": self.computing,
            "waiting_seconds": self.waits,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_update": self.num_tokens,
            "flops_per_update": self.flops,
            "disk_bytes_written_per_hour": self.disk_bytes_per_hour,
            "rates": {
                "flops": self.rates.flops,
                "memory_bandwidth": self.rates.memory_bandwidth,
                "bus_bandwidth": self.rates.bus_bandwidth,
                "duplex": self.rates.duplex,
                "host_bandwidth": self.rates.host_bandwidth,
                "link_bandwidth": self.rates.link_bandwidth,
                "disk_bandwidth": self.rates.disk_bandwidth,
                "disk_duplex": self.rates.disk_duplex,
            },
        }


def plan_time(plan: Plan, config: PreTrainedConfig, rates: Rates) -> PlannedTime:
    """Record the updates of a planned run, and play them.

    Args:
        plan: The run, and what it takes.
        config: The model's configuration.
        rates: Of the card.

    Raises:
        ValueError: If the model can't be run without data.
    """
    return play_run(plan, record_run(plan.request, config), rates)


def record_run(request: PlanRequest, config: PreTrainedConfig) -> Schedule:
    """Record what one of a run's GPUs does by itself, its part of what they share out among it.

    Args:
        request: The run.
        config: The model's configuration.

    Raises:
        ValueError: If the model can't be run without data.
    """
    schedule = record_schedule(request, config)
    if request.layout in ("single", "ddp") or planned(request.method).steps_itself:
        return schedule
    return replace(schedule, entries=_shared_out(schedule.entries, request))


def play_run(plan: Plan, schedule: Schedule, rates: Rates) -> PlannedTime:
    """Play the recorded updates of a planned run.

    Args:
        plan: The run, and what it takes.
        schedule: What `record_run` returned for it.
        rates: Of the card.
    """
    request = plan.request
    return PlannedTime(
        rates=rates,
        update=mean_update(schedule, rates),
        owed=owed(plan, rates),
        num_tokens=request.batch_size * request.seq_length * request.gradient_accumulation_steps * request.num_gpus,
        flops=schedule.mean_of_operators(lambda cost: cost[0]),
        disk_bytes_per_update=_disk_bytes_per_update(plan),
        copied="masters, state and activations" if request.offload_activations else "masters and state",
    )


def _disk_bytes_per_update(plan: Plan) -> float:
    """What one of the GPUs' processes writes to files in an update, in the mean over a cycle."""
    request = plan.request
    if request.state != "disk" or not planned(request.method).waits_on_host(request):
        return 0.0
    if request.layout == "fsdp2":
        return mean_state_bytes(plan) / request.num_gpus
    sizes = [group.state_bytes + group.master_bytes for group in plan.groups for _ in group.indices]
    on_disk = [sizes[index] for index in groups_on_disk(sizes, request.state_ram_bytes)]
    # Those that fit into the buffers never leave them; others are written when their turn ends.
    return 0.0 if len(on_disk) <= NUM_BUFFERS else sum(on_disk) / len(sizes) / request.steps_per_group


def with_room_ahead(requirement: MemoryRequirement, device_bytes: int) -> Plan:
    """The plan of a run that loads ahead as far as HiFT does by itself: into what is left, less its margin.

    Args:
        requirement: Of the run with nothing loaded ahead.
        device_bytes: Memory of the GPU.
    """
    plan, request = requirement.plan, requirement.plan.request
    if not planned(request.method).waits_on_host(request) or request.layout not in ("single", "ddp"):
        return plan
    room = room_ahead(requirement, device_bytes, device_bytes)
    return replace(plan, request=replace(request, prefetch_bytes=max(request.prefetch_bytes, room)))


def room_ahead(requirement: MemoryRequirement, limit_bytes: int, memory_bytes: int) -> int:
    """Bytes that HiFT takes by itself to load ahead into: what is left, less its margin.

    Args:
        requirement: Of the run with nothing loaded ahead.
        limit_bytes: What of the GPU may be filled.
        memory_bytes: All of the GPU, of which the margin is a share.
    """
    return max(0, limit_bytes - requirement.device_bytes - memory_bytes // MARGIN_SHARE)


def _shared_out(entries: Sequence[Entry], request: PlanRequest) -> list[Entry]:
    """Let each GPU step its part of what trains: copies and the step's work are an N-th, or the host's altogether."""
    number, is_stepping = request.num_gpus, False
    shared: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Begin):
            is_stepping = entry.phase == "step"
        if isinstance(entry, Transfer):
            entry = replace(entry, num_bytes=0 if request.offload_parameters else -(-entry.num_bytes // number))
        elif isinstance(entry, Work) and is_stepping:
            entry = replace(entry, operators=_parts(entry.operators, number, request.offload_parameters))
        shared.append(entry)
    return shared


def _parts(operators: Mapping[Cost, int], number: int, is_hosts: bool) -> dict[Cost, int]:
    if is_hosts:
        return {}
    parts: dict[Cost, int] = {}
    for (flops, num_bytes), count in operators.items():
        cost = (flops // number, num_bytes // number)
        parts[cost] = parts.get(cost, 0) + count
    return parts
