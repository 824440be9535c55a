"""Planned seconds against what is worked out by hand, rule by rule."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from slivertune.planning.cards import LAUNCH_SECONDS, Rates
from slivertune.planning.make import make_plan
from slivertune.planning.plan import GroupPlan, Plan
from slivertune.planning.step_work import UpdateWork, Work
from slivertune.planning.time_formula import disk_bytes_per_update, mean_update
from tests.helpers.plan_requests import paper_request
from tests.planning.made import group, moment, narrow_llama, plan

RATES = Rates(flops=10.0, memory_bandwidth=100.0, bus_bandwidth=10.0, disk_bandwidth=1e9)
COPIES = "copies of masters and state"
# A group of 100 parameters has 1,200 bytes of masters and state: 120 s over the bus. With 16 bytes a parameter on the
# device, a piece of 160 bytes is a tenth of it: 12 s to load, 12 s to write back, and 2 s of the step's 20 s.
PIECE = 120
GROUP: GroupPlan = replace(
    group(0, "model.layers.0", moment(), num_parameters=100),
    state_bytes=800,
    master_bytes=400,
    gradient_bytes=200,
    largest_gradient_bytes=80,
)


def seconds_of(seconds: float, **copies: int) -> Work:
    """Operators that take so many seconds, and bytes over the bus (`in_parameters`, `out_gradients`, ...)."""
    names = {"in": "inbound", "out": "outbound"}
    copied = {(names[name.partition("_")[0]], name.partition("_")[2]): size for name, size in copies.items()}
    return Work(Counter({(int(10 * seconds), 1): 1}), Counter(copied))  # type: ignore[arg-type]


def run_of(forward: Work, backward: Work, step: Work, *, own: Work | None = None, **settings: Any) -> Plan:
    """A run of HiFT with one group, whose micro-batches are all alike."""
    settings = {"method": "hift", "precision": "mixed_hi", "stream_bytes": 160, **settings}
    update = UpdateWork(
        share=1.0,
        group=0,
        forwards=(forward,),
        backwards=(backward,),
        step=step,
        num_blocks=4,
        own_backward=own or Work(),
    )
    return replace(plan(paper_request(**settings), GROUP), updates=(update,))


def waits(run: Plan, rates: Rates = RATES) -> float:
    """Seconds in which it waits for copies."""
    waiting = mean_update(run, rates).waiting
    return sum(seconds for reason, seconds in waiting.items() if reason.startswith("copies of"))


def test_an_operator_takes_its_operations_or_its_bytes_whichever_is_longer() -> None:
    work = Work(Counter({(50, 100): 2, (10, 400): 1, (0, 300): 3}))
    run = run_of(work, work.times(2), work, state="device")
    update = mean_update(run, RATES)
    each = 2 * 5 + 4 + 3 * 3
    assert update.computing == {"forward": each, "backward": 2 * each, "step": each}
    assert not update.waiting and update.seconds == 4 * each
    # Fused into products costs nothing, but for the step.
    compiled = mean_update(run, replace(RATES, is_compiled=True)).computing
    assert compiled == {"forward": 14, "backward": 28, "step": each}


def test_an_operator_on_a_tile_takes_its_launch_its_memory_or_the_cache_whichever_is_longest() -> None:
    # Memory at 100 bytes/s, the cache at 400.
    run = run_of(Work(), Work(tiles=Counter({(100, 0): 2, (100, 500): 3, (0, 200): 1})), Work(), state="device")
    assert mean_update(run, replace(RATES, cache_bandwidth=400.0)).seconds == pytest.approx(2 * 1 + 3 * 1.5 + 0.5)
    assert mean_update(run, RATES).seconds == pytest.approx(2 * 1 + 3 * 6 + 2)
    tiny = run_of(Work(), Work(tiles=Counter({(0, 1): 4})), Work(), state="device")
    assert mean_update(tiny, replace(RATES, cache_bandwidth=1e12)).seconds == pytest.approx(4 * LAUNCH_SECONDS)


def test_a_mean_is_that_of_the_updates_that_there_are() -> None:
    run = run_of(seconds_of(5), seconds_of(1), seconds_of(1), state="device")
    other = replace(run.updates[0], share=0.75, forwards=(seconds_of(9),))
    run = replace(run, updates=(replace(run.updates[0], share=0.25), other))
    assert mean_update(run, RATES).computing["forward"] == 0.25 * 5 + 0.75 * 9


@pytest.mark.parametrize(
    ("settings", "before", "expected"),
    [
        # Two slots take turns: a load, a step and a write-back are 26 s for two pieces. The last is then stepped.
        ({"prefetch_bytes": 0}, 150, 10 * 13 + 2 - 20),
        # Four pieces came before; the next begins when the first was stepped and written back.
        ({"prefetch_bytes": 4 * PIECE}, 150, (2 + 12) + 6 * 12 + 2 - 20),
        # All have room, and came in 150 s; of 30 s they have had 300 bytes.
        ({"prefetch_bytes": 20 * PIECE}, 150, 0),
        ({"prefetch_bytes": 20 * PIECE}, 30, 7.5 * 12 + 2 - 20),
        # All stay for the turn, and come in the first of its ten updates.
        ({"prefetch_bytes": 20 * PIECE, "steps_per_group": 10}, 30, (7.5 * 12 + 2 - 20) / 10),
        # Of six slots three stay. In the first update six pieces came before, in the others the three that pass first.
        (
            {"prefetch_bytes": 6 * PIECE, "steps_per_group": 10},
            150,
            ((14 + 4 * 12 + 2 - 20) + 9 * (14 + 4 * 12 + 2 - 20)) / 10,
        ),
        # What is dropped is new in each turn, and its memory is waited for.
        ({"state": "discard", "steps_per_group": 2}, 150, (120 + 112) / 2),
        ({"state": "device"}, 150, 0),
        # One piece is the whole group.
        ({"stream_bytes": 0}, 150, 120 + (2 * 120 + 20) / 2 - 120 + 20 - 20),
    ],
    ids=str,
)
def test_state_is_waited_for_where_it_comes_neither_before_the_step_nor_beside_it(
    settings: dict[str, Any], before: int, expected: float
) -> None:
    run = run_of(seconds_of(before / 3), seconds_of(2 * before / 3), seconds_of(20), **settings)
    assert waits(run) == pytest.approx(expected, abs=0.2)


def test_copies_in_fp32_that_are_no_masters_make_pieces_smaller() -> None:
    works = seconds_of(50), seconds_of(100), seconds_of(20)
    run = run_of(*works, precision="bf16", master="stochastic", prefetch_bytes=0)
    # 8 of a parameter's 16 bytes are copied: 80 of a piece of 160.
    run = replace(run, groups=(replace(GROUP, master_bytes=0),))
    assert waits(run) == pytest.approx(10 * 9 + 2 - 20)


def test_gradients_leave_under_the_backward_and_come_back_with_their_pieces() -> None:
    def run(backward: int, number: int, *, largest: int = 80, forward: int = 50) -> Plan:
        settings = {"gradients": "host", "gradient_accumulation_steps": number, "prefetch_bytes": 0}
        made = run_of(seconds_of(forward), seconds_of(backward), seconds_of(20), **settings)
        return replace(made, groups=(replace(GROUP, largest_gradient_bytes=largest),))

    # A piece of 160 bytes has room for 18 bytes a parameter: 106.7 of state and 17.8 of gradients, 10.7 s alone.
    piece, each = 160 * 12 / 18, 20 * 160 / 1800
    rest = (1200 + 200) / piece * (2 * piece / 10 + each) / 2 + each - 20
    # Of the 20 s of all gradients the largest's 8 have nothing beside them.
    assert waits(run(50, 1)) == pytest.approx(8 + rest)
    assert waits(run(5, 1)) == pytest.approx(15 + 8 + rest)
    # From the second on a sum comes as well: the backward's 5 s and twice 20, for two gradients at a time.
    assert waits(run(5, 3)) == pytest.approx(15 + 2 * (22.5 - 5) + 16 + rest)
    # One of 15 s leaves alone, under the next forward; with its sum in 30 s. The others take 5.
    assert waits(run(50, 3, largest=150)) == pytest.approx(30 + rest)
    assert waits(run(50, 3, largest=150, forward=10)) == pytest.approx((15 - 10) + (30 - 10) + 30 + rest)


def test_where_the_backward_steps_state_comes_beside_the_backward_of_all_trained_blocks_but_one() -> None:
    own = seconds_of(40)
    run = run_of(seconds_of(50), seconds_of(60), seconds_of(20), own=own, gradients="stepped", prefetch_bytes=480)
    assert waits(run) == pytest.approx((2 + 12) + 6 * 12 + 2 - 20 - 40 * 3 / 4)


def test_weights_and_activations_pass_under_the_phase_that_needs_them() -> None:
    settings = {"state": "device", "method": "dense", "precision": "bf16"}
    forward, backward = seconds_of(30), seconds_of(50, in_activations=800)
    run = run_of(forward, backward, seconds_of(1), gradient_checkpointing=True, offload_activations=True, **settings)
    # 80 s each way.
    found = mean_update(run, RATES).waiting
    assert found == {"copies of activations": pytest.approx((80 - 30) + (80 - 50))}


def test_the_first_block_of_weights_on_the_host_has_nothing_before_it() -> None:
    def run(**settings: Any) -> Plan:
        forward, backward = seconds_of(100, in_parameters=1200), seconds_of(200, in_parameters=800)
        return run_of(forward, backward, seconds_of(20), weights="host", prefetch_bytes=20 * PIECE, **settings)

    # 120 s of weights in four blocks. What trained goes back behind 120 s of state, another 120 s, and a block in the
    # middle of the forward's 120 s waits for it. State has the backward's 200 s, of which weights take 80.
    assert waits(run()) == pytest.approx(20 + 30 + (120 + 120 - 60))
    assert waits(run(steps_per_group=10)) == pytest.approx(20 + 30 + (120 + 120 - 60) / 10)
    assert waits(run(resident_bytes=1)) == pytest.approx(20 + (120 + 120 - 60))


def test_weights_that_come_after_state_was_queued_wait_behind_it() -> None:
    works = seconds_of(100, in_parameters=400), seconds_of(50), seconds_of(20)
    run = run_of(*works, weights="host", prefetch_bytes=20 * PIECE, gradient_accumulation_steps=2)
    # A block's 10 s twice; 120 s of state and a block behind the first backward's 50; what goes back to a block has 50.
    assert waits(run) == pytest.approx(20 + (120 + 10 - 50) + (120 + 40 - 50))


def test_ranks_that_share_state_out_step_and_copy_their_part() -> None:
    works = seconds_of(50), seconds_of(100), seconds_of(20)
    run = run_of(*works, layout="zero2", num_gpus=4)
    update = mean_update(run, replace(RATES, link_bandwidth=1e9))
    assert update.computing == {"forward": 50, "backward": 100, "step": 5}
    # A piece is four tenths of a quarter.
    assert update.waiting[COPIES] == pytest.approx(2.5 * 13 + 2 - 5)
    hosts = mean_update(run_of(*works, layout="zero3", num_gpus=4, offload_parameters=True), RATES)
    assert hosts.computing["step"] == 0 and COPIES not in hosts.waiting and "the host's update" in hosts.waiting


def test_the_disk_reads_and_writes_under_the_updates_meanwhile() -> None:
    works = seconds_of(50), seconds_of(100), seconds_of(20)
    run = run_of(*works, state="disk", prefetch_bytes=20 * PIECE)
    run = replace(run, groups=(replace(GROUP, indices=(0, 1, 2, 3)),))
    assert disk_bytes_per_update(run) == 1200
    assert "the disk" not in mean_update(run, replace(RATES, disk_bandwidth=2400 / 170)).waiting
    slow = replace(RATES, disk_bandwidth=2400 / 200)
    assert mean_update(run, slow).waiting["the disk"] == pytest.approx(30)
    longer = replace(run, request=replace(run.request, steps_per_group=4))
    assert disk_bytes_per_update(longer) == 300
    in_memory = replace(run, request=replace(run.request, state_ram_bytes=2**40))
    assert disk_bytes_per_update(in_memory) == 0


TINY = narrow_llama(2)
SLOW_BUS = Rates(flops=1e10, memory_bandwidth=1e11, bus_bandwidth=5e8)


@cache
def plan_of(**settings: Any) -> Plan:
    return make_plan(paper_request(**{"method": "hift", "precision": "mixed_hi", "seq_length": 32, **settings}), TINY)


@pytest.mark.parametrize(
    "less", [{"prefetch_bytes": 2**20}, {"steps_per_group": 10, "prefetch_bytes": 2**20}, {"state": "device"}], ids=str
)
def test_what_saves_copies_leaves_less_to_wait_for_and_computes_the_same(less: dict[str, Any]) -> None:
    usual, lighter = (
        mean_update(plan_of(stream_bytes=2**14, gradient_checkpointing=True, **each), SLOW_BUS) for each in ({}, less)
    )
    assert 0 <= lighter.waiting.get(COPIES, 0.0) < usual.waiting[COPIES]
    assert sum(lighter.computing.values()) == pytest.approx(sum(usual.computing.values()), rel=1e-4)
