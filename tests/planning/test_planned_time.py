"""Planned seconds, against schedules that are run in full, and against what is worked out by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig

from slivertune.planning.cards import Rates
from slivertune.planning.collectives import owed
from slivertune.planning.hift_schedule import record_hift
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.planned_time import plan_time, with_room_ahead
from slivertune.planning.recorded_run import record_schedule
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Begin, Schedule, Transfer, Work
from slivertune.planning.schedule_player import UpdateTime, mean_update, play
from tests.planning.made import rotary_operations

HIDDEN, MLP, VOCABULARY, NUM_BLOCKS = 64, 96, 200, 9
TINY = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=MLP,
    num_hidden_layers=NUM_BLOCKS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
IN_PRODUCTS = NUM_BLOCKS * (HIDDEN * (64 + 32 + 32 + 64) + 3 * HIDDEN * MLP) + HIDDEN * VOCABULARY
"""Weights of matrix products."""
NUM_PARAMETERS = IN_PRODUCTS + VOCABULARY * HIDDEN + (2 * NUM_BLOCKS + 1) * HIDDEN
TOKENS = 32
ROTARY = rotary_operations(TOKENS, head_size=HIDDEN // 4)
SLOW_BUS = Rates(flops=1e10, memory_bandwidth=1e11, bus_bandwidth=5e8)
FAST_BUS = Rates(flops=1e10, memory_bandwidth=1e11, bus_bandwidth=5e9)


def request_of(**settings: Any) -> PlanRequest:
    return PlanRequest(**{"seq_length": TOKENS, "stream_bytes": 2**17, "method": "dense", **settings})


@cache
def schedule_of(**settings: Any) -> Schedule:
    return record_schedule(request_of(**settings), TINY)


@cache
def plan_of(**settings: Any) -> Plan:
    return make_plan(request_of(**settings), TINY)


def operations(schedule: Schedule, phase: str) -> float:
    """Of a mean update's phase."""
    total, share = 0.0, 0.0
    for entry in schedule.entries:
        if isinstance(entry, Begin):
            share = schedule.shares.get(entry.step, 0.0) * (entry.phase == phase)
        elif isinstance(entry, Work):
            total += share * sum(flops * count for (flops, _), count in entry.operators.items())
    return total


def close(first: UpdateTime, second: UpdateTime, *, rel: float = 1e-9) -> None:
    for phase in ("forward", "backward", "step"):
        assert first.seconds[phase] == pytest.approx(second.seconds[phase], rel=rel)
    assert first.exposed == pytest.approx(second.exposed, rel=rel, abs=1e-12)


def test_a_mean_is_that_of_the_steps_that_count() -> None:
    entries = []
    for step, seconds in enumerate([5, 1, 3]):
        entries += [Begin(step, 0, "forward"), Work("computing", {(seconds, 0): 1})]
    rates = Rates(flops=1, memory_bandwidth=1, bus_bandwidth=1)
    assert mean_update(Schedule(entries=entries, shares={1: 0.25, 2: 0.75}), rates).total == 0.25 * 1 + 0.75 * 3


def test_dense_fine_tuning_computes_what_its_products_do() -> None:
    schedule = schedule_of(chunked_cross_entropy=False, precision="bf16")  # for which there is a fused attention
    scores = NUM_BLOCKS * HIDDEN * TOKENS * TOKENS // 2  # of all heads, over half the square
    assert operations(schedule, "forward") == 2 * TOKENS * IN_PRODUCTS + 2 * 2 * scores + ROTARY
    # Each product's two gradients; of attention the scores once more, and four gradients.
    assert operations(schedule, "backward") == 2 * 2 * TOKENS * IN_PRODUCTS + 5 * 2 * scores
    assert schedule.shares == {0: 1.0}


def test_its_update_reads_and_writes_weights_moments_and_gradients() -> None:
    rates = Rates(flops=1e30, memory_bandwidth=1.0, bus_bandwidth=1.0)
    seconds = mean_update(schedule_of(), rates).seconds["step"]
    # Four of 4 bytes are read and, as the operator's schema has it, written; step counts are a few bytes a tensor.
    assert seconds == pytest.approx(2 * 4 * 4 * NUM_PARAMETERS, rel=1e-3)


def test_checkpointing_computes_the_blocks_once_more() -> None:
    usual, again = (schedule_of(gradient_checkpointing=on, chunked_cross_entropy=False) for on in (False, True))
    assert operations(again, "forward") == operations(usual, "forward")
    more = operations(again, "backward") - operations(usual, "backward")
    # Head and rotary angles are in no block; a block's last product is what nothing needs any more.
    last = 2 * TOKENS * HIDDEN * (VOCABULARY + NUM_BLOCKS * MLP) + ROTARY
    assert more == operations(usual, "forward") - last


@pytest.mark.parametrize("method", ["dense", "lora", "sft"])
def test_micro_batches_alike_are_run_once_and_count_as_often_as_they_are(method: str) -> None:
    one, two, five = (
        mean_update(schedule_of(method=method, density=0.05, gradient_accumulation_steps=number), FAST_BUS).seconds
        for number in (1, 2, 5)
    )
    assert five["forward"] == pytest.approx(5 * one["forward"], rel=1e-9)
    assert five["step"] == pytest.approx(one["step"], rel=1e-9)
    # From the second on, gradients are added to those that there are.
    assert five["backward"] == pytest.approx(one["backward"] + 4 * (two["backward"] - one["backward"]), rel=1e-9)


@pytest.mark.parametrize("rates", [SLOW_BUS, FAST_BUS], ids=["slow bus", "fast bus"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradients": "stepped", "prefetch_bytes": 2**18}, {"gradients": "host", "layers_per_group": 3}],
    ids=["usual", "stepped", "three layers, gradients on the host"],
)
def test_a_sample_of_hifts_turns_has_the_mean_of_a_whole_cycle(settings: dict[str, Any], rates: Rates) -> None:
    settings = {"method": "hift", "precision": "mixed_hi", **settings}
    sample, whole = schedule_of(**settings), record_hift(request_of(**settings), TINY)
    num_groups = len(whole.groups)
    assert sum(sample.shares.values()) == pytest.approx(1)
    assert len(whole.shares) == num_groups >= len(sample.shares)
    if num_groups > 6:
        assert len(sample.shares) < num_groups / 2
    close(mean_update(sample, rates), mean_update(whole, rates))


def test_hift_computes_the_forward_of_all_and_the_backward_from_its_group_up() -> None:
    hift, dense = schedule_of(method="hift"), schedule_of()
    assert operations(hift, "forward") == pytest.approx(operations(dense, "forward"))
    # In the mean the inputs' gradients of half the blocks, and the weights' of one group.
    assert 0.2 < operations(hift, "backward") / operations(dense, "backward") < 0.45


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"estimation_steps": 5, "reselection_interval": 20}, [1, 3, 1, 1, 14]),
        ({"estimation_steps": 2, "reselection_interval": 4}, [1, 1, 1, 1]),
        ({"estimation_steps": 1, "reselection_interval": 2}, [1, 1]),
        ({"reselection_interval": 0}, [0, 1]),
        ({"selection": "momentum", "reselection_interval": 20}, [0, 0, 19, 1]),
        ({"selection": "momentum", "reselection_interval": 1}, [0, 1]),
    ],
    ids=str,
)
def test_sfts_kinds_of_updates_count_as_often_as_they_come(settings: dict[str, Any], shares: list[int]) -> None:
    schedule = schedule_of(method="sft", density=0.05, **settings)
    assert schedule.shares == pytest.approx({place: share / sum(shares) for place, share in enumerate(shares) if share})
    num_recorded = max(entry.step for entry in schedule.entries if isinstance(entry, Begin)) + 1
    assert num_recorded == len(shares)


def test_sfts_updates_that_estimate_or_reselect_take_longer() -> None:
    rates = Rates(flops=1e30, memory_bandwidth=1e9, bus_bandwidth=1e9)
    phases = [step.total for step in play(schedule_of(method="sft", density=0.05).entries, rates)]
    assert min(phases[:3]) > phases[4]
    *_, usual, reselects = [
        step.total for step in play(schedule_of(method="sft", density=0.05, selection="momentum").entries, rates)
    ]
    assert reselects > usual


def test_tokens_that_carry_no_gradient_save_most_of_the_backward() -> None:
    usual, half = schedule_of(method="dense"), schedule_of(method="dense", token_ratio=0.25)
    assert operations(half, "backward") < 0.4 * operations(usual, "backward")


def moved(schedule: Schedule, step: int) -> dict[str, int]:
    """Bytes that a step's forward and backward copy, by direction."""
    found, phase = dict.fromkeys(("inbound", "outbound"), 0), ("", -1)
    for entry in schedule.entries:
        if isinstance(entry, Begin):
            phase = entry.phase, entry.step
        if isinstance(entry, Transfer) and phase[1] == step and phase[0] != "step":
            found[entry.direction] += entry.num_bytes
    return found


@pytest.mark.parametrize("method", ["dense", "lora", "sft"])
def test_inputs_of_blocks_cross_the_bus_once_each_way(method: str) -> None:
    settings = {"method": method, "gradient_checkpointing": True, "density": 0.05 if method == "sft" else None}
    offloaded = schedule_of(**settings, offload_activations=True)
    inputs_bytes = NUM_BLOCKS * TOKENS * HIDDEN * 4
    step = max(offloaded.shares)
    assert moved(offloaded, step) == {"inbound": inputs_bytes, "outbound": inputs_bytes}
    assert moved(schedule_of(**settings), step) == {"inbound": 0, "outbound": 0}
    plan = plan_of(**settings, offload_activations=True)
    assert list(plan_time(plan, TINY, SLOW_BUS).waits) == ["copies of masters, state and activations"]


def test_tiles_cost_one_more_forward_of_the_mlps_but_for_the_last_tile() -> None:
    settings = {"method": "dense", "gradient_checkpointing": True}
    whole, tiled = schedule_of(**settings), schedule_of(**settings, token_tile_size=8)
    of_mlps = 2 * TOKENS * 3 * HIDDEN * MLP * NUM_BLOCKS
    assert operations(tiled, "forward") == operations(whole, "forward")
    # In a block's second forward nothing asks for what the last of its four tiles gives.
    assert operations(tiled, "backward") - operations(whole, "backward") == pytest.approx(3 / 4 * of_mlps)


def test_seconds_are_those_of_computation_and_of_each_wait() -> None:
    plan = plan_of(method="hift", precision="mixed_hi")
    time = plan_time(plan, TINY, SLOW_BUS)
    assert time.seconds == pytest.approx(mean_update(schedule_of(method="hift", precision="mixed_hi"), SLOW_BUS).total)
    assert list(time.waits) == ["copies of masters and state"]
    assert time.seconds == pytest.approx(sum(time.computing.values()) + sum(time.waits.values()))
    assert time.tokens_per_second == TOKENS / time.seconds
    assert time.hours(3600 * time.tokens_per_second) == pytest.approx(1)
    assert time.disk_bytes_per_hour == 0
    values = time.to_json()
    assert values["seconds_per_update"] == time.seconds and values["tokens_per_update"] == TOKENS


def test_state_on_disk_is_written_in_each_turn() -> None:
    plan = plan_of(method="hift", precision="mixed_hi", state="disk")
    time = plan_time(plan, TINY, SLOW_BUS)
    num_groups = NUM_BLOCKS + 2
    num_tensors = NUM_BLOCKS * 9 + 3  # each with a step count
    assert time.disk_bytes_per_update == pytest.approx((12 * NUM_PARAMETERS + 4 * num_tensors) / num_groups)
    assert time.disk_bytes_per_hour == pytest.approx(time.disk_bytes_per_update * 3600 / time.seconds)
    assert "the disk" not in time.waits
    slow = plan_time(plan, TINY, replace(SLOW_BUS, disk_bandwidth=time.disk_bytes_per_update / time.seconds))
    # What was written and read under the update takes twice as long as all of it.
    assert slow.waits["the disk"] == pytest.approx(time.seconds) and slow.seconds == pytest.approx(2 * time.seconds)
    assert time.to_json()["rates"]["disk_bandwidth"] == 5e9


def test_groups_in_memory_and_longer_turns_write_less() -> None:
    in_turn = plan_time(plan_of(method="hift", precision="mixed_hi", state="disk", steps_per_group=4), TINY, SLOW_BUS)
    each_step = plan_time(plan_of(method="hift", precision="mixed_hi", state="disk"), TINY, SLOW_BUS)
    assert in_turn.disk_bytes_per_update == pytest.approx(each_step.disk_bytes_per_update / 4)
    none = plan_of(method="hift", precision="mixed_hi", state="disk", state_ram_bytes=2**40)
    assert plan_time(none, TINY, SLOW_BUS).disk_bytes_per_update == 0


RING, BUS = 3 / 4, SLOW_BUS.bus_bandwidth
ALL = 4.0 * NUM_PARAMETERS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"layout": "ddp"}, {("collectives", "backward"): 2 * RING * ALL / BUS}),
        (
            {"layout": "zero1", "gradient_accumulation_steps": 3},
            {("collectives", "backward"): RING * ALL / BUS, ("collectives", "step"): RING * ALL / BUS},
        ),
        (
            {"layout": "zero2", "gradient_accumulation_steps": 3},
            {("collectives", "backward"): 3 * RING * ALL / BUS, ("collectives", "step"): RING * ALL / BUS},
        ),
        (
            {"layout": "zero3"},
            {("collectives", "forward"): RING * ALL / BUS, ("collectives", "backward"): 2 * RING * ALL / BUS},
        ),
        (
            {"layout": "fsdp2", "offload_parameters": True},
            {
                ("collectives", "forward"): RING * ALL / BUS,
                ("collectives", "backward"): 2 * RING * ALL / BUS,
                ("weights from the host", "forward"): ALL / 4 / BUS,
                ("weights from the host", "backward"): ALL / 4 / BUS,
                ("the host's update", "step"): 28 * NUM_PARAMETERS / 4 / 40e9,
            },
        ),
    ],
    ids=lambda value: value.get("layout", "") if isinstance(value, dict) else "",
)
def test_several_gpus_owe_each_other_what_their_engine_moves(
    settings: dict[str, Any], expected: dict[tuple[str, str], float]
) -> None:
    found = owed(plan_of(num_gpus=4, **settings), SLOW_BUS)
    assert {(each.reason, each.phase): each.seconds for each in found} == pytest.approx(expected)


def test_what_is_owed_hides_under_the_computation_of_its_phase_and_only_there() -> None:
    under, after = owed(plan_of(layout="zero1", num_gpus=4), SLOW_BUS)
    assert under.waited_for(2 * under.seconds) == 0 and under.waited_for(under.seconds / 4) == 0.75 * under.seconds
    assert after.waited_for(1e9) == after.seconds
    # The sum of all micro-batches goes under the last of four.
    (last,) = owed(plan_of(layout="ddp", num_gpus=4, gradient_accumulation_steps=4), SLOW_BUS)
    assert last.waited_for(2 * last.seconds) == last.seconds / 2
    linked = replace(SLOW_BUS, link_bandwidth=10 * BUS)
    assert owed(plan_of(layout="ddp", num_gpus=4), linked)[0].seconds == pytest.approx(2 * RING * ALL / BUS / 10)


def test_fsdp2_on_one_rank_brings_its_weights_beside_nothing() -> None:
    for layout, num_gpus, hides in (("fsdp2", 1, False), ("fsdp2", 2, True), ("zero3", 1, True)):
        plan = plan_of(layout=layout, num_gpus=num_gpus, offload_parameters=True)
        weights = [each for each in owed(plan, SLOW_BUS) if each.reason == "weights from the host"]
        assert [each.waited_for(1e9) == 0 for each in weights] == [hides, hides]


def test_ranks_that_share_state_out_step_their_part() -> None:
    rates = Rates(flops=1e30, memory_bandwidth=1e9, bus_bandwidth=1e9)
    alone = plan_time(plan_of(), TINY, rates)
    shared = plan_time(plan_of(layout="zero2", num_gpus=4), TINY, rates)
    assert shared.computing["step"] == pytest.approx(alone.computing["step"] / 4, rel=1e-3)
    assert shared.computing["forward"] == alone.computing["forward"]
    assert shared.num_tokens == 4 * alone.num_tokens


def test_what_is_left_of_the_card_is_loaded_ahead_into() -> None:
    requirement = add_allowance(plan_of(method="hift", precision="mixed_hi"))
    card = 2 * requirement.device_bytes
    assert with_room_ahead(requirement, card).request.prefetch_bytes == card - requirement.device_bytes - card // 16
    assert with_room_ahead(requirement, requirement.device_bytes).request.prefetch_bytes == 0
    dense = add_allowance(plan_of())
    assert with_room_ahead(dense, 2 * dense.device_bytes) is dense.plan
