"""Time of an update by a formula: the plan's counts, divided by the rates that a GPU is assumed to reach.

An operator takes FLOPs / (efficiency x peak) or bytes / memory bandwidth, whichever is longer. A phase takes the sum of
its operators. Copies run concurrently. S stands for the masters and state of the parameters that train, G for their
gradients if these are offloaded, g for the largest gradient, B for the bus bandwidth per direction, p for a chunk of S,
P for the memory of chunks that are prefetched before their step.

* Offloaded weights and activations are copied during a phase. Computation stalls if the copies take longer than the
  phase. The first block's weights have no computation before them with which they could overlap. Prefetched state is
  queued when the first forward ends, and the next weights queue behind it.
* Gradients must leave during the backward that makes them. From the second micro-batch on, the sum so far is loaded and
  the new sum is written back, while one other gradient is made. The largest gradient, g, overlaps with nothing before
  the step. If it is most of G, it leaves during the next forward.
* State is loaded from the start of its group's updates (with offloaded weights from the end of the forward), up to P.
  The rest is loaded in the step, while other chunks are stepped: p / B per chunk or, with k slots if k is small, 1 / k
  of a slot's round of load, step and write-back. The first slot is free after one step and one write-back.
* If the backward steps, the rest overlaps with the backward of the trained blocks, except the first.
* Write-backs run during the next forward. State that is discarded after its group's updates is new in the first of
  them, which stalls until there is memory for it. The last of them writes nothing back.
* If a group has several updates in a row, all chunks stay resident, or as many as there are slots, less three.

Engines on several GPUs communicate during the computation of their phase (`collectives`). Disk reads and writes overlap
with the updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slivertune.hift.device_budget import chunks_bytes, share_out
from slivertune.hift.disk import NUM_BUFFERS, groups_on_disk
from slivertune.hift.offloaded_state import PASSING_CHUNKS, WORKING_CHUNKS
from slivertune.planning.cards import LAUNCH_SECONDS, Rates
from slivertune.planning.collectives import mean_state_bytes, owed
from slivertune.planning.methods import planned
from slivertune.planning.plan import Phase, Plan
from slivertune.planning.request import PlanRequest
from slivertune.planning.step_work import UpdateWork, Work

PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanUpdate:
    """Mean time of an update on one GPU, over a run."""

    computing: Mapping[Phase, float]
    """Seconds of computation, by phase."""
    waiting: Mapping[str, float]
    """Seconds in which computation stalls, by reason."""

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return sum(self.computing.values()) + sum(self.waiting.values())


def mean_update(plan: Plan, rates: Rates) -> MeanUpdate:
    """Compute the mean time of a run's updates.

    Args:
        plan: Plan of the run, with the work of its updates.
        rates: Rates that the GPU is assumed to reach.
    """
    computing, together = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    for work in plan.updates:
        update = _Update(plan, work, rates)
        for phase, seconds in update.computing.items():
            computing[phase] += work.share * seconds
        for phase, seconds in update.with_copies().items():
            together[phase] += work.share * seconds
    waiting = {f"copies of {_copied(plan.request)}": sum(together.values()) - sum(computing.values())}
    for each in owed(plan, rates):
        waiting[each.reason] = waiting.get(each.reason, 0.0) + each.waited_for(together[each.phase])
    # A group is read into the buffer from which another was written. Both overlap with the updates.
    moved = 2 * disk_bytes_per_update(plan) / rates.disk_bandwidth
    waiting["the disk"] = moved - sum(computing.values()) - sum(waiting.values())
    return MeanUpdate(computing=computing, waiting={reason: each for reason, each in waiting.items() if each > 0})


def _copied(request: PlanRequest) -> str:
    """Return the words for what crosses the bus in an update."""
    names = ["masters", "state"] if planned(request.method).waits_on_host(request) else []
    names += ["weights"] if request.weights == "host" else []
    names += ["activations"] if request.offload_activations else []
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names or ["masters and state"])


def disk_bytes_per_update(plan: Plan) -> float:
    """Return the bytes that the process of one GPU writes to files per update, as a mean over a cycle."""
    request = plan.request
    if request.state != "disk" or not planned(request.method).waits_on_host(request):
        return 0.0
    if request.layout == "fsdp2":
        return mean_state_bytes(plan) / request.num_gpus
    sizes = [group.state_and_master_bytes for group in plan.groups for _ in group.indices]
    on_disk = [sizes[index] for index in groups_on_disk(sizes, request.state_ram_bytes)]
    # Groups that fit into the buffers never leave them. Others are written after their last update in a row.
    return 0.0 if len(on_disk) <= NUM_BUFFERS else sum(on_disk) / len(sizes) / request.steps_per_group


def _part(plan: Plan) -> float:
    """Return the share of an update that one GPU steps: 1, 1 / N, or 0 if the host steps."""
    request = plan.request
    if request.layout in ("single", "ddp") or planned(request.method).steps_itself:
        return 1.0
    return 0.0 if request.offload_parameters else 1 / request.num_gpus


class _Update:
    """Computes the time of one kind of a run's updates.

    Args:
        plan: Plan of the run.
        work: Work of the update.
        rates: Rates of the GPU.
    """

    def __init__(self, plan: Plan, work: UpdateWork, rates: Rates) -> None:
        self._rates, self._work, self._request = rates, work, plan.request
        request, group, part = plan.request, plan.groups[work.group], _part(plan)
        self._num = num = request.gradient_accumulation_steps
        self._forward, self._backward = work.forward(num), work.backward(num)
        self.computing: dict[Phase, float] = {
            "forward": self._seconds(self._forward, is_fused=rates.is_compiled),
            "backward": self._seconds(self._backward, is_fused=rates.is_compiled),
            "step": part * self._seconds(work.step),
        }
        """Seconds of computation, by phase."""
        moves = planned(request.method).waits_on_host(request)
        self._is_stepped = request.gradients == "stepped"
        on_host = moves and (request.gradients == "host" or (self._is_stepped and num > 1))
        self._state = part * group.state_and_master_bytes if moves else 0.0
        self._gradients = part * group.gradient_bytes if on_host else 0.0
        self._largest = part * group.largest_gradient_bytes if moves else 0.0
        # A chunk has room for gradients and weights cast to fp32, and for gradients that are loaded from the host.
        num_casts = 2 if request.master_kind == "stochastic" else bool(group.master_bytes)
        # Gradients of layers above the group are not among them.
        own = min(self._gradients, part * group.num_parameters * (2 if request.has_bf16_weights else _FP32))
        in_chunk = self._state + own + part * _FP32 * group.num_parameters * num_casts
        chunk_bytes = request.hift_config().chunk_bytes * (2 if self._is_stepped else 1) if moves else 0
        share = min(1.0, chunk_bytes / in_chunk) if chunk_bytes and in_chunk else 1.0
        self._num_chunks = 1 / share
        self._chunk = share * self._state
        in_slot = share * (self._state + own)
        prefetched, self._resident = request.prefetch_bytes or 0, request.resident_bytes or 0
        if request.device_bytes is not None and moves:
            config = request.hift_config()
            sizes = [(each.state_and_master_bytes, each.gradient_bytes) for each in plan.groups]
            shares = share_out(config, lambda: max(chunks_bytes(config, *each) for each in sizes))
            prefetched, self._resident = (0 if each == "auto" else each for each in shares)
        elif request.device_bytes is not None:
            self._resident = self._resident or request.device_bytes
        self._slots = int(prefetched // in_slot) if in_slot else 0
        self._queued = 0.0 if request.state == "discard" else min(self._state, self._slots * self._chunk)
        """Bytes of state that are prefetched at the same time, and so are written back together."""
        num_blocks = work.num_streamed or sum(each.num_blocks for each in plan.updates)
        self._block = self._forward.copied("inbound", "parameters") / num / max(1, num_blocks)

    def _seconds(self, work: Work, *, is_fused: bool = False) -> float:
        seconds = sum(
            count * max(flops / self._rates.flops, num_bytes / self._rates.memory_bandwidth)
            for (flops, num_bytes), count in work.operators.items()
            if flops or not is_fused
        )
        return seconds + sum(count * self._tile_seconds(*cost) for cost, count in work.tiles.items())

    def _tile_seconds(self, num_bytes: int, num_small: int) -> float:
        """Return the time of an operator on a tile: of its launch, its memory or the cache, whichever is longest."""
        rates = self._rates
        if rates.cache_bandwidth is None:
            return max(LAUNCH_SECONDS, (num_bytes + num_small) / rates.memory_bandwidth)
        through_cache = (num_bytes + num_small) / rates.cache_bandwidth
        return max(LAUNCH_SECONDS, num_bytes / rates.memory_bandwidth, through_cache)

    def _copying(self, inbound: float, outbound: float = 0.0) -> float:
        """Return the seconds of copies in both directions at the same time."""
        return max(inbound, outbound) / self._rates.bus_bandwidth

    def with_copies(self) -> dict[Phase, float]:
        """Return the seconds of each phase, including stalls for copies."""
        forward, (backward, before_step) = self._streamed_forward(), self._backward_with_gradients()
        step = self.computing["step"] + before_step
        if self._state:
            step += self._waits_for_state(forward, backward)
        return {"forward": forward, "backward": backward, "step": step}

    def _streamed_forward(self) -> float:
        weights = self._forward.copied("inbound", "parameters")
        inputs = self._backward.copied("inbound", "activations")  # of the blocks that this backward reaches
        seconds = max(self.computing["forward"], self._copying(weights, inputs))
        if not weights:
            return seconds
        first = 0.0 if self._resident else self._num * self._copying(self._block)
        # When the next group begins, trained weights are written back behind the state, and their block waits for this.
        back = self._copying(0, self._queued + self._work.num_blocks * self._block)
        late = max(0.0, back - seconds / self._num / 2) if self._work.num_blocks else 0.0
        return seconds + first + late / self._request.steps_per_group

    def _backward_with_gradients(self) -> tuple[float, float]:
        """Return the seconds of all backward passes, and those after the last in which its largest gradient leaves."""
        weights = self._copying(self._backward.copied("inbound", "parameters", "activations"))
        seconds = max(self.computing["backward"], weights)
        if self._request.weights == "host":
            # State is queued when the first forward ends, and the next weights queue behind it.
            behind = weights if self._num == 1 else self._copying(self._block)
            seconds += max(0.0, self._copying(self._queued) + behind - seconds / self._num) if behind else 0.0
        num_leaving = self._num - self._is_stepped
        if not self._gradients or not num_leaving:
            return seconds, 0.0
        # A gradient that is most of all bytes is made alone, and leaves during the next forward.
        largest = self._copying(0, self._largest)
        alone = self._largest if self._largest > self._gradients / 2 else 0.0
        one, others = seconds / self._num, self._copying(0, self._gradients - alone)
        for index in range(num_leaving):
            sums = index > 0
            under = max(one, others, (one + 2 * others) / 2 if sums else 0.0)
            is_last = index == self._num - 1
            after = 0.0 if is_last else max(0.0, (1 + sums) * largest - self.computing["forward"] / self._num)
            seconds += under - one + after
        return seconds, 0.0 if self._is_stepped else (1 + (self._num > 1)) * largest

    def _waits_for_state(self, forward: float, backward: float) -> float:
        """Return the seconds in which the step stalls for state, as a mean over a group's updates in a row."""
        request = self._request
        others: float = self._backward.copied("inbound", "parameters", "activations", "gradients")
        time, window, late = backward, self.computing["step"], self._gradients
        if self._is_stepped:
            last = backward / self._num
            blocks = self._work.num_blocks
            time -= last
            window += self._seconds(self._work.own_backward) * (1 - 1 / blocks) if blocks else 0.0
            late = max(0.0, late - last * self._rates.bus_bandwidth)
        if request.weights == "device":
            time += forward
        elif self._num > 1:
            time += forward * (1 - 1 / self._num)
            others += self._forward.copied("inbound", "parameters") * (1 - 1 / self._num)
        ahead = max(0.0, time - self._copying(others)) * self._rates.bus_bandwidth
        staying = 0.0
        if request.steps_per_group > 1:
            num = self._num_chunks if self._slots >= self._num_chunks else max(0, self._slots - PASSING_CHUNKS)
            staying = min(self._state, num * self._chunk)
        first = self._waits(self._state, self._slots, ahead, late, window)
        if request.state == "discard":
            first = self._copying(0, self._state)
        later = self._waits(
            self._state - staying, min(self._slots, PASSING_CHUNKS) if staying else self._slots, ahead, late, window
        )
        return (first + (request.steps_per_group - 1) * later) / request.steps_per_group

    def _waits(self, state: float, slots: int, ahead: float, gradients: float, window: float) -> float:
        """Return the seconds that loads take beyond a window of computation."""
        room = slots * self._chunk if slots >= WORKING_CHUNKS else 0.0
        rest = state - min(state, room, ahead)
        if rest + gradients <= 0:
            return 0.0
        load, each = self._copying(self._chunk, self._chunk), self.computing["step"] / self._num_chunks
        one = max(load, (2 * load + each) / max(WORKING_CHUNKS, slots))
        is_full = 0 < room <= min(state, ahead)
        seconds = (rest + gradients) / self._chunk * one + each + (load + each if is_full else 0.0)
        return max(0.0, seconds - window)
