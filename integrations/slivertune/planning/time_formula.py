"""How long an update takes, by a formula: what the plan has counted, over what a card is taken to reach.

An operator takes FLOPs / (efficiency x peak) or bytes / memory bandwidth, whichever is longer; those of a phase take
their sum. Copies run beside it. S stands for the masters and the state of what trains, G for its gradients where they
wait on the host, g for the largest of them, B for the bus each way, p for a piece of S, P for the room of pieces that
are loaded ahead of their step.

* What passes in a phase, weights and activations that wait on the host, is waited for where it takes longer than the
  computation of the phase. The first block's weights have nothing before them under which they could come. State
  that is loaded ahead is queued when the first forward ends, and weights that come next wait behind it.
* Gradients have to leave under the backward that makes them. From the second micro-batch on the sum so far comes and
  the new one leaves, beside which one other gradient is made. The largest, g, has nothing beside it before the step; if
  it is most of G, it leaves under the next forward.
* State comes from the turn's beginning (with weights from the host from the end of the forward), as much as P holds.
  The rest comes in the step, beside what is stepped: p / B a piece, or, with few slots, the k-th part of a slot's
  round, which is a load, a step and a write-back. The first slot is free after one step and one write-back.
* Where the backward steps, the rest comes beside the backward of the trained blocks, but for the first.
* Write-backs run under the next forward. State that is dropped after its turn is new in the first update of one, and
  its memory is waited for; of the last, nothing is written back.
* Where a turn has several updates, as many pieces stay as there are slots, less three, or all.

Engines of several GPUs send under the computation of their phase (`collectives`). The disk reads and writes under the
updates meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slivertune.hift.device_pieces import PASSING_PIECES
from slivertune.hift.disk import NUM_BUFFERS, groups_on_disk
from slivertune.hift.streamed import WORKING_PIECES
from slivertune.planning.cards import Rates
from slivertune.planning.collectives import mean_state_bytes, owed
from slivertune.planning.methods import planned
from slivertune.planning.plan import Phase, Plan
from slivertune.planning.step_work import UpdateWork, Work

PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanUpdate:
    """What an update takes on one GPU, in the mean over a run."""

    computing: Mapping[Phase, float]
    """Seconds of computation, by phase."""
    waiting: Mapping[str, float]
    """Seconds in which computation stands still, by reason."""

    @property
    def seconds(self) -> float:
        """Seconds of all of it."""
        return sum(self.computing.values()) + sum(self.waiting.values())


def mean_update(plan: Plan, rates: Rates) -> MeanUpdate:
    """Compute what an update takes, in the mean over a run's.

    Args:
        plan: The run, with what its updates compute and copy.
        rates: What the card is taken to reach.
    """
    computing, together = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    for work in plan.updates:
        update = _Update(plan, work, rates)
        for phase, seconds in update.computing.items():
            computing[phase] += work.share * seconds
        for phase, seconds in update.with_copies().items():
            together[phase] += work.share * seconds
    copied = "masters, state and activations" if plan.request.offload_activations else "masters and state"
    waiting = {f"copies of {copied}": sum(together.values()) - sum(computing.values())}
    for each in owed(plan, rates):
        waiting[each.reason] = waiting.get(each.reason, 0.0) + each.waited_for(together[each.phase])
    # A group is read into the buffer from which another was written, under the updates meanwhile.
    moved = (2 if rates.disk_duplex == "half" else 1) * disk_bytes_per_update(plan) / rates.disk_bandwidth
    waiting["the disk"] = moved - sum(computing.values()) - sum(waiting.values())
    return MeanUpdate(computing=computing, waiting={reason: each for reason, each in waiting.items() if each > 0})


def disk_bytes_per_update(plan: Plan) -> float:
    """Return what one of the GPUs' processes writes to files in an update, in the mean over a cycle."""
    request = plan.request
    if request.state != "disk" or not planned(request.method).waits_on_host(request):
        return 0.0
    if request.layout == "fsdp2":
        return mean_state_bytes(plan) / request.num_gpus
    sizes = [group.state_and_master_bytes for group in plan.groups for _ in group.indices]
    on_disk = [sizes[index] for index in groups_on_disk(sizes, request.state_ram_bytes)]
    # Those that fit into the buffers never leave them; others are written when their turn ends.
    return 0.0 if len(on_disk) <= NUM_BUFFERS else sum(on_disk) / len(sizes) / request.steps_per_group


def _part(plan: Plan) -> float:
    """Return the share of an update that one GPU steps: all of it, an N-th, or none where the host steps."""
    request = plan.request
    if request.layout in ("single", "ddp") or planned(request.method).steps_itself:
        return 1.0
    return 0.0 if request.offload_parameters else 1 / request.num_gpus


class _Update:
    """One kind of a run's updates on a card.

    Args:
        plan: The run.
        work: What the update computes and copies.
        rates: Of the card.
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
        # A piece has room for gradients cast to fp32, and for those that come from the host.
        in_piece = self._state + self._gradients + part * _FP32 * group.num_parameters * bool(group.master_bytes)
        share = min(1.0, request.stream_bytes / in_piece) if request.stream_bytes and in_piece else 1.0
        self._num_pieces = 1 / share
        self._piece = share * self._state
        in_slot = share * (self._state + self._gradients)
        self._slots = int(request.prefetch_bytes // in_slot) if in_slot else 0
        self._queued = 0.0 if request.state == "discard" else min(self._state, self._slots * self._piece)
        """Bytes of state that are loaded ahead at once, and so leave together."""
        num_blocks = sum(each.num_blocks for each in plan.updates)
        self._block = self._forward.copied("inbound", "parameters") / num / max(1, num_blocks)

    def _seconds(self, work: Work, *, is_fused: bool = False) -> float:
        return sum(
            count * max(flops / self._rates.flops, num_bytes / self._rates.memory_bandwidth)
            for (flops, num_bytes), count in work.operators.items()
            if flops or not is_fused
        )

    def _copying(self, inbound: float, outbound: float = 0.0) -> float:
        """Seconds of copies that go both ways at once."""
        both, rates = inbound + outbound, self._rates
        slowest = both if rates.duplex == "half" else max(inbound, outbound)
        of_host = 0.0 if rates.host_bandwidth is None else both / rates.host_bandwidth
        return max(slowest / rates.bus_bandwidth, of_host)

    def with_copies(self) -> dict[Phase, float]:
        """Return the seconds of each phase, with those in which computation waits for copies."""
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
        first = 0.0 if self._request.resident_bytes else self._num * self._copying(self._block)
        # What trained goes back behind the state when the next turn begins, where its block waits for it.
        back = self._copying(0, self._queued + self._work.num_blocks * self._block)
        late = max(0.0, back - seconds / self._num / 2) if self._work.num_blocks else 0.0
        return seconds + first + late / self._request.steps_per_group

    def _backward_with_gradients(self) -> tuple[float, float]:
        """Seconds of all backward passes, and those after the last in which its largest gradient leaves."""
        weights = self._copying(self._backward.copied("inbound", "parameters", "activations"))
        seconds = max(self.computing["backward"], weights)
        if self._request.weights == "host":
            # State is queued when the first forward ends, and whatever weights come next wait behind it.
            behind = weights if self._num == 1 else self._copying(self._block)
            seconds += max(0.0, self._copying(self._queued) + behind - seconds / self._num) if behind else 0.0
        num_leaving = self._num - self._is_stepped
        if not self._gradients or not num_leaving:
            return seconds, 0.0
        # One gradient that is most of all is made alone, and leaves under the forward that follows.
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
        """Seconds in which the step waits for state, in the mean over a turn's updates."""
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
            num = self._num_pieces if self._slots >= self._num_pieces else max(0, self._slots - PASSING_PIECES)
            staying = min(self._state, num * self._piece)
        first = self._waits(self._state, self._slots, ahead, late, window)
        if request.state == "discard":
            first = self._copying(0, self._state)
        later = self._waits(
            self._state - staying, min(self._slots, PASSING_PIECES) if staying else self._slots, ahead, late, window
        )
        return (first + (request.steps_per_group - 1) * later) / request.steps_per_group

    def _waits(self, state: float, slots: int, ahead: float, gradients: float, window: float) -> float:
        """Seconds that loads take beyond a window of computation."""
        room = slots * self._piece if slots >= WORKING_PIECES else 0.0
        rest = state - min(state, room, ahead)
        if rest + gradients <= 0:
            return 0.0
        load, each = self._copying(self._piece, self._piece), self.computing["step"] / self._num_pieces
        one = max(load, (2 * load + each) / max(WORKING_PIECES, slots))
        is_full = 0 < room <= min(state, ahead)
        seconds = (rest + gradients) / self._piece * one + each + (load + each if is_full else 0.0)
        return max(0.0, seconds - window)
