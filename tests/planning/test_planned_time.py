"""Planned seconds, and what several GPUs and files add to them, against what is worked out by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from slivertune.planning.cards import Rates
from slivertune.planning.collectives import owed
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.planned_time import plan_time, with_room_ahead
from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request
from tests.planning.made import narrow_llama, weights_of_narrow_llama

NUM_BLOCKS, TOKENS = 2, 32
TINY = narrow_llama(NUM_BLOCKS)
NUM_PARAMETERS = weights_of_narrow_llama(NUM_BLOCKS)
SLOW_BUS = Rates(flops=1e10, memory_bandwidth=1e11, bus_bandwidth=5e8)


def request_of(**settings: Any) -> PlanRequest:
    return paper_request(**{"seq_length": TOKENS, "stream_bytes": 2**17, "method": "dense", **settings})


@cache
def plan_of(**settings: Any) -> Plan:
    return make_plan(request_of(**settings), TINY)


def test_seconds_are_those_of_computation_and_of_each_wait() -> None:
    plan = plan_of(method="hift", precision="mixed_hi")
    time = plan_time(plan, SLOW_BUS)
    update = time.update
    assert list(update.computing) == ["forward", "backward", "step"]
    assert list(update.waiting) == ["copies of masters and state"]
    assert time.seconds == pytest.approx(sum(update.computing.values()) + sum(update.waiting.values()))
    assert time.tokens_per_second == TOKENS / time.seconds
    assert time.hours(3600 * time.tokens_per_second) == pytest.approx(1)
    assert time.disk_bytes_per_hour == 0
    values = time.to_json()
    assert values["seconds_per_update"] == time.seconds and values["tokens_per_update"] == TOKENS


def test_state_on_disk_is_written_in_each_turn() -> None:
    plan = plan_of(method="hift", precision="mixed_hi", state="disk")
    time = plan_time(plan, SLOW_BUS)
    num_groups = NUM_BLOCKS + 2
    num_tensors = NUM_BLOCKS * 9 + 3  # each with a step count
    assert time.disk_bytes_per_update == pytest.approx((12 * NUM_PARAMETERS + 4 * num_tensors) / num_groups)
    assert time.disk_bytes_per_hour == pytest.approx(time.disk_bytes_per_update * 3600 / time.seconds)
    assert "the disk" not in time.update.waiting
    slow = plan_time(plan, replace(SLOW_BUS, disk_bandwidth=time.disk_bytes_per_update / time.seconds))
    # What was written and read under the update takes twice as long as all of it.
    assert slow.update.waiting["the disk"] == pytest.approx(time.seconds) and slow.seconds == pytest.approx(
        2 * time.seconds
    )
    assert time.to_json()["rates"]["disk_bandwidth"] == 5e9


def test_groups_in_memory_and_longer_turns_write_less() -> None:
    in_turn = plan_time(plan_of(method="hift", precision="mixed_hi", state="disk", steps_per_group=4), SLOW_BUS)
    each_step = plan_time(plan_of(method="hift", precision="mixed_hi", state="disk"), SLOW_BUS)
    assert in_turn.disk_bytes_per_update == pytest.approx(each_step.disk_bytes_per_update / 4)
    none = plan_of(method="hift", precision="mixed_hi", state="disk", state_ram_bytes=2**40)
    assert plan_time(none, SLOW_BUS).disk_bytes_per_update == 0


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
        # Each micro-batch gathers; ZeRO-3 reduces in each, FSDP2 in the last.
        (
            {"layout": "zero3", "gradient_accumulation_steps": 3},
            {("collectives", "forward"): 3 * RING * ALL / BUS, ("collectives", "backward"): 6 * RING * ALL / BUS},
        ),
        (
            {"layout": "fsdp2", "gradient_accumulation_steps": 3},
            {("collectives", "forward"): 3 * RING * ALL / BUS, ("collectives", "backward"): 4 * RING * ALL / BUS},
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
    alone = plan_time(plan_of(), rates)
    shared = plan_time(plan_of(layout="zero2", num_gpus=4), rates)
    assert shared.update.computing["step"] == pytest.approx(alone.update.computing["step"] / 4, rel=1e-3)
    assert shared.update.computing["forward"] == alone.update.computing["forward"]
    assert shared.num_tokens == 4 * alone.num_tokens


def test_what_is_left_of_the_card_is_loaded_ahead_into() -> None:
    requirement = add_allowance(plan_of(method="hift", precision="mixed_hi"))
    card = 2 * requirement.device_bytes
    assert with_room_ahead(requirement, card).request.prefetch_bytes == card - requirement.device_bytes - card // 16
    assert with_room_ahead(requirement, requirement.device_bytes).request.prefetch_bytes == 0
    dense = add_allowance(plan_of())
    assert with_room_ahead(dense, 2 * dense.device_bytes) is dense.plan
