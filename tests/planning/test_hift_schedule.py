"""The recorded schedule of HiFT's steps, against what can be counted or worked out without running them."""

import math
from collections import Counter
from functools import cache
from typing import Any, get_args

import pytest
from transformers import LlamaConfig

from slivertune.planning.cards import Duplex, Rates, card_named
from slivertune.planning.hift_schedule import HiFTSchedule, record_hift
from slivertune.planning.recorded_run import record_schedule
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Begin, Entry, Record, Schedule, Synchronize, Transfer, Wait, Work
from slivertune.planning.schedule_player import exposed_share, mean_update
from tests.planning.made import rotary_operations

TINY = LlamaConfig(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
NUM_GROUPS = 5
ATTENTION, MLP = 64 * (64 + 32 + 32 + 64), 3 * 64 * 96
NUM_PARAMETERS = 2 * 200 * 64 + 3 * (ATTENTION + MLP + 2 * 64) + 64
ONE_BLOCK = LlamaConfig(vocab_size=64, num_hidden_layers=1)  # of Llama-2-7B
BLOCK_PARAMETERS = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
SLOW_BUS = Rates(flops=1e12, memory_bandwidth=1e12, bus_bandwidth=1e9)


@cache
def record(*, is_block_of_7b: bool = False, max_grad_norm: float | None = None, **settings: Any) -> HiFTSchedule:
    request = PlanRequest(**{"precision": "mixed_hi", "seq_length": 32, "stream_bytes": 2**17, **settings})
    return record_hift(request, ONE_BLOCK if is_block_of_7b else TINY, max_grad_norm=max_grad_norm)


def in_cycle(schedule: HiFTSchedule) -> list[Entry]:
    """The entries of the last steps, as many as there are groups."""
    begins = [(place, each) for place, each in enumerate(schedule.entries) if isinstance(each, Begin)]
    last = begins[-1][1].step
    start = next(place for place, each in begins if each.step == last - len(schedule.groups) + 1)
    return list(schedule.entries[start:])


def bytes_each_way(entries: list[Entry], *, same: bool = True) -> Counter[str]:
    counted: Counter[str] = Counter()
    for each in entries:
        if isinstance(each, Transfer):
            assert each.stream == each.direction or not same
            counted[each.direction] += each.num_bytes
    return counted


@pytest.mark.parametrize("prefetch_bytes", [0, 2**18, 2**30])
@pytest.mark.parametrize(
    "settings",
    [{}, {"layers_per_group": 2, "gradient_checkpointing": True}, {"gradients": "stepped"}],
    ids=["usual", "two layers", "in the backward"],
)
def test_a_cycle_brings_and_takes_twelve_bytes_a_parameter(settings: dict[str, Any], prefetch_bytes: int) -> None:
    counted = bytes_each_way(in_cycle(record(prefetch_bytes=prefetch_bytes, **settings)))
    assert counted == {"inbound": 12 * NUM_PARAMETERS, "outbound": 12 * NUM_PARAMETERS}


@pytest.mark.parametrize(
    ("settings", "each_way"),
    [
        ({"gradients": "host"}, (14, 14)),
        # Each backward after the first brings back what there is, and leaves the sum; then the step has it back.
        ({"gradients": "host", "gradient_accumulation_steps": 3}, (12 + 3 * 2, 12 + 3 * 2)),
        # The last one leaves none.
        ({"gradients": "stepped", "gradient_accumulation_steps": 3}, (12 + 2 * 2, 12 + 2 * 2)),
    ],
    ids=lambda value: str(value),
)
def test_gradients_on_the_host_pass_the_bus_with_two_bytes_each(
    settings: dict[str, Any], each_way: tuple[int, int]
) -> None:
    counted = bytes_each_way(in_cycle(record(prefetch_bytes=2**18, **settings)), same=False)
    assert (counted["inbound"] / NUM_PARAMETERS, counted["outbound"] / NUM_PARAMETERS) == each_way


def test_every_group_has_a_step_of_the_cycle_and_its_micro_batches() -> None:
    schedule = record(gradient_accumulation_steps=3)
    begins = [each for each in in_cycle(schedule) if isinstance(each, Begin)]
    phases = [*["forward", "backward"] * 3, "step"]
    assert [(each.group, each.phase) for each in begins] == [
        (group, phase) for group in [2, 3, 4, 0, 1] for phase in phases
    ]
    assert len(schedule.groups) == NUM_GROUPS and schedule.groups[0] == "embedding"
    assert [each.group for each in schedule.cycle(SLOW_BUS)] == list(range(NUM_GROUPS))


@pytest.mark.parametrize("prefetch_bytes", [0, 2**18, 2**30])
def test_no_piece_is_stepped_before_it_is_loaded_or_loaded_into_what_has_not_left(prefetch_bytes: int) -> None:
    """By the order of entries alone: a load, its event, the computing stream's wait for it, work, and a store."""
    schedule = record(prefetch_bytes=prefetch_bytes)
    entries = list(schedule.entries)
    recorded: set[int] = set()
    for place, each in enumerate(entries):
        if isinstance(each, Record):
            assert each.event not in recorded
            recorded.add(each.event)
        elif isinstance(each, Transfer):
            after, before = entries[place + 1], entries[place - 1]
            assert isinstance(after, Record) and after.stream == each.stream
            assert isinstance(before, Wait) and before.stream == each.stream
            if each.direction == "outbound":
                assert Record("computing", before.event) in entries[place - 2 : place - 1]
            else:
                waits = [later for later in entries[place:] if later == Wait("computing", after.event)]
                is_loaded_ahead = each in [one for one in entries[-60:] if isinstance(one, Transfer)]
                assert len(waits) == 1 or is_loaded_ahead
    assert not [each for each in entries if isinstance(each, Synchronize)]


@pytest.mark.parametrize("gradients", ["device", "stepped"])
def test_with_room_nothing_is_computed_after_what_leaves(gradients: str) -> None:
    entries = in_cycle(record(gradients=gradients, prefetch_bytes=2**30))
    leaving = {each.event for each in entries if isinstance(each, Record) and each.stream == "outbound"}
    assert leaving
    assert not [
        each for each in entries if isinstance(each, Wait) and each.stream == "computing" and each.event in leaving
    ]


def test_the_forward_computes_what_its_products_do() -> None:
    batch, length = 2, 48
    schedule = record(batch_size=batch, seq_length=length, chunked_cross_entropy=False)
    entries = in_cycle(schedule)
    begins = [place for place, each in enumerate(entries) if isinstance(each, Begin)]
    forward = entries[begins[0] : begins[1]]
    flops = sum(cost[0] * n for each in forward if isinstance(each, Work) for cost, n in each.operators.items())
    tokens = batch * length
    products = 2 * tokens * (3 * (ATTENTION + MLP) + 200 * 64)
    scores = 3 * 4 * batch * length * length * 64 // 2  # two products of all heads over half the square
    assert flops == products + scores + rotary_operations(length, head_size=64 // 4)


def test_room_to_load_ahead_leaves_less_exposed_and_never_less_than_nothing() -> None:
    schedules = [record(prefetch_bytes=room) for room in (0, 2**17, 2**30)]
    for duplex in get_args(Duplex):
        # A forward takes three times as long as a group's state on the bus, or next to nothing.
        shares = {}
        for flops in (1e10, 1e15):
            rates = Rates(flops=flops, memory_bandwidth=1e12, bus_bandwidth=1e9, duplex=duplex)
            cycles = [schedule.cycle(rates) for schedule in schedules]
            assert all(seconds >= 0 for times in cycles for step in times for seconds in step.exposed_by.values())
            shares[flops] = [exposed_share(times) for times in cycles]
        print(shares)
        none, some, all_ = shares[1e10]
        assert none > some > all_ >= 0 and all_ < none / 10
        none, some, all_ = shares[1e15]
        assert 1 > none > max(some, all_) > 0.5


def test_a_run_that_is_not_hifts_has_no_schedule() -> None:
    with pytest.raises(ValueError, match=r"method='dense'.*take method='hift'"):
        record_hift(PlanRequest(method="dense"), TINY)


def naive_step_seconds(piece_sizes: list[int], bus: float, step_bytes: float, duplex: str, window: float) -> float:
    """From the backward's end to the end of the step: a lane each way, two slots, one copy at a time on a half bus."""
    inbound, outbound, computing, half = -window, -math.inf, 0.0, -window
    ready: list[float] = []
    left: list[float] = []

    def load(after: float) -> None:
        nonlocal inbound, half
        index = len(ready)
        start = max(inbound, after, left[index - 2] if index > 1 else -math.inf)
        if duplex == "half":
            start = max(start, half)
        inbound = start + 12 * piece_sizes[index] / bus
        half = inbound
        ready.append(inbound)

    load(-window)
    load(-window)
    for index, size in enumerate(piece_sizes):
        computing = max(computing, ready[index]) + step_bytes * size / 1e12
        start = max(outbound, computing, half if duplex == "half" else -math.inf)
        outbound = start + 12 * size / bus
        half = max(half, outbound)
        left.append(outbound)
        if index + 2 < len(piece_sizes):
            load(computing)
    return max(computing, outbound)


@pytest.mark.parametrize(("duplex", "worked_out"), [("full", 0.104), ("half", 0.197)])
def test_a_block_of_7b_without_room_takes_what_was_worked_out_before(duplex: Any, worked_out: float) -> None:
    """A group of 202 million weights on a bus of 25 GB/s, pieces of 128 MiB: 104 ms, 197 with half duplex.

    Worked out before for pieces of 8 million weights (16 bytes each on the device) that are stepped at 26 bytes a
    weight, loaded from 4 ms before the end of the backward. Ours are about as large, take more bytes a weight to step,
    and share a half bus evenly where those took turns; so up to a piece's copy may differ at either end.
    """
    pieces = [8_388_608] * math.ceil(BLOCK_PARAMETERS / 8_388_608)
    assert naive_step_seconds(pieces, 25e9, 26, duplex, 0.004) == pytest.approx(worked_out, abs=0.001)
    schedule = record(is_block_of_7b=True, seq_length=512, stream_bytes=128 * 2**20)
    block = schedule.cycle(card_named("4090").rates(bus_bandwidth=25e9, duplex=duplex))[1]
    assert block.seconds["step"] == pytest.approx(worked_out, abs=2 * 12 * pieces[0] / 25e9)


def test_weights_that_wait_on_the_host_come_for_each_forward_and_again_from_the_active_group_upward() -> None:
    block_bytes = 2 * (ATTENTION + MLP + 2 * 64)
    settings = {"weights": "host", "gradient_checkpointing": True}
    more = bytes_each_way(in_cycle(record(**settings)))
    more.subtract(bytes_each_way(in_cycle(record(gradient_checkpointing=True))))
    # Each block goes back once a cycle. Of three blocks and as many slots all come once in a forward, but for the one
    # that trained before, and none has to come again.
    assert more["outbound"] == 3 * block_bytes
    assert more["inbound"] == (NUM_GROUPS * 3 - 3) * block_bytes
    stays = bytes_each_way(in_cycle(record(**settings, resident_bytes=2**30)))
    assert stays == bytes_each_way(in_cycle(record(gradient_checkpointing=True)))


def test_state_comes_under_the_backward_where_weights_come_under_the_forward() -> None:
    block_bytes = 2 * (ATTENTION + MLP + 2 * 64)
    counted: Counter[str] = Counter()
    phase = ""
    for each in in_cycle(record(weights="host", gradient_checkpointing=True, prefetch_bytes=2**30)):
        if isinstance(each, Begin):
            phase = each.phase
        elif isinstance(each, Transfer) and each.direction == "inbound":
            counted[phase] += each.num_bytes
    # What `forward` records ends with the forward, at whose end the state is queued: no weight is queued behind it.
    state = 12 * NUM_PARAMETERS
    assert sum(counted.values()) == state + (NUM_GROUPS * 3 - 3) * block_bytes
    assert counted["step"] == 0
    steps = record(weights="host", gradient_checkpointing=True, prefetch_bytes=2**30).cycle(SLOW_BUS)
    late = record(weights="host", gradient_checkpointing=True).cycle(SLOW_BUS)
    assert exposed_share(steps) < exposed_share(late)


def recorded(**settings: Any) -> Schedule:
    """What a plan's time is made of."""
    request = PlanRequest(**{"precision": "mixed_hi", "seq_length": 32, "stream_bytes": 2**17, **settings})
    return record_schedule(request, TINY)


@pytest.mark.parametrize("steps_per_group", [2, 3, 20])
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_an_update_of_a_group_that_stays_takes_as_long_where_nothing_is_held(
    gradients: Any, steps_per_group: int
) -> None:
    times = [
        mean_update(recorded(gradients=gradients, steps_per_group=number), SLOW_BUS) for number in (1, steps_per_group)
    ]
    assert sum(times[1].seconds.values()) == pytest.approx(sum(times[0].seconds.values()), rel=0.01)


@pytest.mark.parametrize("room", [2**17, 2**18])
def test_what_stays_does_not_take_the_room_that_others_need_to_pass(room: int) -> None:
    # The forward is long enough to load all that there is room for: then it is no gain that something stays.
    rates, piece = Rates(flops=1.5e12, memory_bandwidth=1e12, bus_bandwidth=1e11), 2**15
    passing, staying = (
        mean_update(
            recorded(layers_per_group=2, stream_bytes=piece, prefetch_bytes=room, steps_per_group=number), rates
        )
        for number in (1, 20)
    )
    three_pieces = 3 * piece / rates.bus_bandwidth
    assert sum(staying.seconds.values()) <= sum(passing.seconds.values()) + three_pieces


@pytest.mark.parametrize("gradients", ["device", "stepped"])
@pytest.mark.parametrize("steps_per_group", [1, 2, 3, 20])
def test_state_that_has_room_is_copied_once_a_turn(steps_per_group: int, gradients: Any) -> None:
    schedule = recorded(gradients=gradients, steps_per_group=steps_per_group, prefetch_bytes=2**30)
    assert sum(schedule.shares.values()) == pytest.approx(1)
    counted: Counter[str] = Counter()
    step = 0
    for each in schedule.entries:
        if isinstance(each, Begin):
            step = each.step
        elif isinstance(each, Transfer):
            counted[each.direction] += schedule.shares.get(step, 0) * each.num_bytes
    expected = 12 * NUM_PARAMETERS / NUM_GROUPS / steps_per_group
    assert counted["inbound"] == pytest.approx(expected) and counted["outbound"] == pytest.approx(expected)
