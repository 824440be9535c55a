"""What a step is counted to compute and copy, against what can be worked out without running it."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from slivertune.core.ledger import Ledger, claim
from slivertune.core.torch_internals import FakeTensor, TorchDispatchMode
from slivertune.hift import compiled_passes, tiled_steps
from slivertune.hift.compiled_passes import CompiledPasses
from slivertune.hift.stochastic_rounding import StochasticRounding
from slivertune.hift.tiled_steps import TilePasses, TransformersRule, step_in_tiles
from slivertune.planning.counter import WorkCounter, beside_computation
from slivertune.planning.fake import without_data
from slivertune.planning.kernels import attend
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan
from slivertune.planning.step_work import UpdateWork, Work
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick
from tests.planning.made import (
    HIDDEN,
    IN_BLOCK,
    MLP,
    VOCABULARY,
    narrow_llama,
    rotary_operations,
    weights_of_narrow_llama,
)

NUM_BLOCKS, TOKENS = 2, 32
IN_PRODUCTS = NUM_BLOCKS * IN_BLOCK + HIDDEN * VOCABULARY
NUM_PARAMETERS = weights_of_narrow_llama(NUM_BLOCKS)
ROTARY = rotary_operations(TOKENS, head_size=HIDDEN // 4)


@contextmanager
def counted() -> Iterator[WorkCounter]:
    """A counter of what runs inside, among tensors without data."""
    counter = WorkCounter()
    with without_data(), counter.counting("part"):
        yield counter


def test_a_counter_knows_the_modes_of_one_count_only() -> None:
    counter, seen = WorkCounter(), list[Any]()

    class Replacing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def work() -> torch.Tensor:
        return torch.empty(7) + 1

    with without_data():
        with counter.counting("first"):
            made = [work() for _ in range(3)]
        with Replacing(), counter.counting("second"):
            made += [work() for _ in range(3)]
    assert len(seen) == 6 and {type(each) for each in made} == {FakeTensor}
    assert counter.work_of("first") == counter.work_of("second") and counter.work_of("first").num_operators == 3
    with counter.counting("third"):
        assert type(work()) is torch.Tensor


def test_a_plan_in_another_thread_shows_a_ledger_nothing() -> None:
    def plan() -> None:
        with without_data(), counter.counting("part"):
            kept.extend(torch.empty(1000) + 1 for _ in range(3))

    counter, kept = WorkCounter(), list[torch.Tensor]()
    with Ledger() as ledger:
        ledger.reset_peak()
        before = ledger.current()
        thread = threading.Thread(target=plan)
        thread.start()
        thread.join()
        assert ledger.current() == before and len(kept) == 3


def on_host(num_bytes: int) -> torch.Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    claim(memory, "state", "host")
    return memory


def test_copies_between_host_and_device_pass_the_bus_and_others_do_not() -> None:
    with counted() as counter:
        host, device, slot = on_host(40), torch.empty(40, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
        claim(slot, "state")
        device.view(torch.int32)[:5].copy_(host.view(torch.int32)[5:], non_blocking=True)
        slot.copy_(host[:8], non_blocking=True)
        host.copy_(device, non_blocking=True)
        device[:3].copy_(device[3:6])
        host[:3].copy_(host[3:6])
    work = counter.work_of("part")
    assert work.copies == {("inbound", "activations"): 20, ("inbound", "state"): 8, ("outbound", "activations"): 40}
    assert work.operators == {(0, 6): 1} and work.copied("inbound", "state", "activations") == 28


def test_operators_beside_the_computation_do_not_count_but_their_copies_do() -> None:
    with counted() as counter:
        sums, host = torch.empty(10), on_host(40).view(torch.float32)
        with beside_computation():
            sums.add_(torch.empty(10).copy_(host))
        sums.zero_()
    work = counter.work_of("part")
    assert work.operators == {(0, 40): 1} and work.copies == {("inbound", "activations"): 40}


def test_views_and_forms_take_nothing_and_what_is_expanded_is_read_once() -> None:
    with counted() as counter:
        x = torch.empty(8, 4)
        x.t().view(4, 8)[1:].expand(3, 8)
        torch.empty_like(x).new_empty(3)
        x.is_contiguous()
        assert not counter.work_of("part").operators
        torch.empty(4).expand(1000, 4).contiguous()
        torch.embedding(torch.empty(1000, 4), torch.empty(3, dtype=torch.int64))
        torch._foreach_mul_([x, x], 2.0)
    # Four numbers read and 4,000 written; three rows read and written and their three numbers; x twice.
    assert counter.work_of("part").operators == {(0, 16 * 1001): 1, (0, 2 * 48 + 24): 1, (0, 4 * 128): 1}


def test_products_count_two_operations_each() -> None:
    with counted() as counter:
        weight = torch.empty(5, 3, requires_grad=True)
        F.linear(torch.empty(2, 7, 3), weight).backward(torch.empty(2, 7, 5))
    # The result, and the weight's gradient; each reads two of the three tensors and writes the third.
    num_bytes = 4 * (2 * 7 * 3 + 5 * 3 + 2 * 7 * 5)
    products = {cost: count for cost, count in counter.work_of("part").operators.items() if cost[0]}
    assert products == {(2 * 14 * 3 * 5, num_bytes): 2}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_that_stores_no_scores_counts_its_products(is_causal: bool, key_heads: int) -> None:
    batch, heads, length, size = 2, 4, 16, 8
    with counted() as counter:
        query = torch.empty(batch, heads, length, size, dtype=torch.bfloat16, requires_grad=True)
        key = torch.empty(batch, key_heads, length, size, dtype=torch.bfloat16, requires_grad=True)
        value = torch.empty_like(key).requires_grad_()
        out = attend(query, key, value, is_causal=is_causal, enable_gqa=key_heads != heads)
        out.backward(torch.empty_like(out))
    costs = [cost for cost in counter.work_of("part").operators if cost[0]]
    product = 2 * batch * heads * length * length * size // (2 if is_causal else 1)
    of_queries, of_keys = (2 * each.numel() for each in (query, key))
    assert costs == [
        (2 * product, 2 * of_queries + 2 * of_keys),
        # Queries, output and its gradient, and the queries' gradient; keys, values, and their gradients.
        (5 * product, 4 * of_queries + 4 * of_keys),
    ]


def test_work_adds_up_and_others_can_be_taken_out() -> None:
    one = Work(Counter({(1, 2): 1}), Counter({("inbound", "state"): 3}), Counter({(4, 5): 2}))
    assert one + one == one.times(2) and one.times(2) - one == one
    assert one.times(5).flops == 5 and one.times(5).num_operators == 15
    assert one.times(0) == Work() or not (one.times(0).flops or one.times(0).num_operators)


@cache
def plan_of(*, num_blocks: int = NUM_BLOCKS, **settings: Any) -> Plan:
    request = paper_request(**{"method": "dense", "seq_length": TOKENS, "stream_bytes": 2**17, **settings})
    return make_plan(request, narrow_llama(num_blocks))


def flops(plan: Plan, phase: str) -> float:
    """Of a mean update's phase."""
    return sum(each.share * work_of(each, phase, plan).flops for each in plan.updates)


def work_of(update: UpdateWork, phase: str, plan: Plan) -> Work:
    num = plan.request.gradient_accumulation_steps
    return {"forward": update.forward(num), "backward": update.backward(num), "step": update.step}[phase]


def test_dense_fine_tuning_computes_what_its_products_do() -> None:
    plan = plan_of(chunked_cross_entropy=False, precision="bf16")  # for which there is a fused attention
    scores = NUM_BLOCKS * HIDDEN * TOKENS * TOKENS // 2  # of all heads, over half the square
    assert flops(plan, "forward") == 2 * TOKENS * IN_PRODUCTS + 2 * 2 * scores + ROTARY
    # Each product's two gradients; of attention the scores once more, and four gradients.
    assert flops(plan, "backward") == 2 * 2 * TOKENS * IN_PRODUCTS + 5 * 2 * scores
    # Four of 2 bytes are read and, as the operator's schema has it, written; step counts are a few bytes a tensor.
    num_bytes = sum(num_bytes * count for (_, num_bytes), count in plan.updates[0].step.operators.items())
    assert num_bytes == pytest.approx(2 * 4 * 2 * NUM_PARAMETERS, rel=1e-3)


def test_checkpointing_computes_the_blocks_once_more() -> None:
    usual, again = (plan_of(gradient_checkpointing=on, chunked_cross_entropy=False) for on in (False, True))
    assert flops(again, "forward") == flops(usual, "forward")
    more = flops(again, "backward") - flops(usual, "backward")
    # Head and rotary angles are in no block; a block's last product is what nothing needs any more.
    last = 2 * TOKENS * HIDDEN * (VOCABULARY + NUM_BLOCKS * MLP) + ROTARY
    assert more == flops(usual, "forward") - last


def test_tiles_cost_one_more_forward_of_the_mlps_but_for_the_last_tile() -> None:
    whole, tiled = (plan_of(gradient_checkpointing=True, token_tile_size=size) for size in (None, 8))
    assert flops(tiled, "forward") == flops(whole, "forward")
    # In a block's second forward nothing asks for what the last of its four tiles gives.
    of_mlps = 2 * TOKENS * 3 * HIDDEN * MLP * NUM_BLOCKS
    assert flops(tiled, "backward") - flops(whole, "backward") == pytest.approx(3 / 4 * of_mlps)


def test_tokens_that_carry_no_gradient_save_most_of_the_backward() -> None:
    assert flops(plan_of(token_ratio=0.25), "backward") < 0.4 * flops(plan_of(), "backward")


SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "lora": {},
    "sft": {"density": 0.05, "selection": "momentum", "reselection_interval": 2},
    "hift": {},
}
"""What a plan of each method is asked for; SFT's has two kinds of updates."""


@pytest.mark.parametrize("method", quick(["dense", "lora", "sft"], ["sft"]))
def test_all_micro_batches_count_though_two_are_run(method: str) -> None:
    settings = {"method": method, **SETTINGS[method]}
    one, two, five = (plan_of(num_blocks=1, **settings, gradient_accumulation_steps=number) for number in (1, 2, 5))
    assert all(len(update.forwards) == 2 for update in five.updates)
    for first, second, all_five in zip(one.updates, two.updates, five.updates, strict=True):
        assert all_five.forward(5) == first.forward(1).times(5)
        # From the second on, gradients are added to those that there are.
        later = second.backward(2) - first.backward(1)
        assert all_five.backward(5) == first.backward(1) + later.times(4)


@pytest.mark.parametrize(
    ("layers", "keep", "checkpointing"),
    quick([(1, 0, False), (2, 0, False), (1, 0, True), (2, 0, True), (1, 1, True)], [(2, 0, False), (1, 1, True)]),
)
@pytest.mark.parametrize("inactive", ["frozen", "above"])
def test_hifts_backward_reaches_from_the_head_down_to_the_group(
    layers: int, keep: int, checkpointing: bool, inactive: str
) -> None:
    settings: dict[str, Any] = {"chunked_cross_entropy": False, "gradient_checkpointing": checkpointing}
    settings |= {"keep_activations": keep, "precision": "mixed_hi"}
    if inactive == "above":
        settings |= {"inactive": "above", "gradients": "stepped", "precision": "bf16", "master": "stochastic"}
    plan = plan_of(method="hift", layers_per_group=layers, **settings)
    assert sum(each.share for each in plan.updates) == pytest.approx(1)
    scores = 2 * HIDDEN * TOKENS * TOKENS // 2  # of one product of all heads
    inputs, weights = 2 * TOKENS * IN_BLOCK + 5 * scores, 2 * TOKENS * IN_BLOCK
    again = 2 * TOKENS * (IN_BLOCK - HIDDEN * MLP) + 2 * scores
    head = 2 * TOKENS * HIDDEN * VOCABULARY
    indices = [index for group in plan.groups for index in group.indices]
    for index, update in zip(indices, plan.updates, strict=True):
        first, last = index * layers, min((index + 1) * layers, NUM_BLOCKS + 2) - 1
        if inactive == "above":
            last = NUM_BLOCKS + 1
        trained = [block for block in range(NUM_BLOCKS) if first <= block + 1 <= last]
        reached = [block for block in range(NUM_BLOCKS) if block + 1 >= first]
        expected = head * (2 if last == NUM_BLOCKS + 1 else 1)  # whose norm trains as well
        expected += sum(inputs for _ in reached) + sum(weights for _ in trained)
        if checkpointing:
            expected += sum(again for block in reached if block < NUM_BLOCKS - keep)
        assert work_of(update, "backward", plan).flops == expected, (index, trained, reached)


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"estimation_steps": 5, "reselection_interval": 20}, [1, 1, 3, 15]),
        ({"estimation_steps": 1, "reselection_interval": 2}, [1, 1]),
        pytest.param({"estimation_steps": 3, "reselection_interval": 4}, [1, 1, 1, 1], marks=pytest.mark.slow),
        ({"reselection_interval": 0}, [1]),
        ({"selection": "momentum", "reselection_interval": 20}, [19, 1]),
        pytest.param({"selection": "momentum", "reselection_interval": 1}, [1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sfts_kinds_of_updates_count_as_often_as_they_come(settings: dict[str, Any], shares: list[int]) -> None:
    plan = plan_of(num_blocks=1, method="sft", density=0.05, **settings)
    assert [each.share for each in plan.updates] == pytest.approx([share / sum(shares) for share in shares])


def test_sfts_updates_that_estimate_or_reselect_take_longer() -> None:
    def touched(work: Work) -> int:
        return sum(num_bytes * count for (_, num_bytes), count in work.operators.items())

    schedule = {"num_blocks": 1, "method": "sft", "density": 0.05, "reselection_interval": 20}
    last, first, between, usual = plan_of(**schedule, estimation_steps=5).updates
    backwards = [touched(each.backward(1)) for each in (last, first, between)]
    assert min(backwards) > touched(usual.backward(1))
    assert touched(last.step) > touched(between.step) >= touched(usual.step) > 0
    usual, reselects = plan_of(**schedule, selection="momentum").updates
    assert touched(reselects.step) > touched(usual.step) > 0


@pytest.mark.parametrize("method", quick(SETTINGS, ["dense", "hift"]))
def test_inputs_of_blocks_cross_the_bus_once_each_way(method: str) -> None:
    settings = {"method": method, "gradient_checkpointing": True, **SETTINGS[method]}
    update = plan_of(**settings, offload_activations=True).updates[0]
    inputs = NUM_BLOCKS * TOKENS * HIDDEN * 4
    assert update.forward(1).copied("outbound", "activations") == inputs
    assert update.backward(1).copied("inbound", "activations") == inputs
    kept = plan_of(**settings).updates[0]
    assert not kept.forward(1).copies and not kept.backward(1).copied("inbound", "activations")


@pytest.mark.parametrize(
    ("settings", "each_way"),
    [
        ({"gradients": "host"}, (0, 2)),
        # Each backward after the first brings back what there is, and leaves the sum.
        ({"gradients": "host", "gradient_accumulation_steps": 3}, (2 * 2, 3 * 2)),
        # The last one leaves none.
        ({"gradients": "stepped", "gradient_accumulation_steps": 2}, (0, 2)),
    ],
    ids=str,
)
def test_gradients_on_the_host_pass_the_bus_with_two_bytes_each(
    settings: dict[str, Any], each_way: tuple[int, int]
) -> None:
    plan = plan_of(method="hift", precision="mixed_hi", **settings)
    num = plan.request.gradient_accumulation_steps
    for update in plan.updates:
        size = plan.groups[update.group].num_parameters
        copied = [update.backward(num).copied(way, "gradients") / size for way in ("inbound", "outbound")]
        assert copied == list(each_way)


def test_weights_on_the_host_come_for_each_forward_and_again_from_the_group_upward() -> None:
    num_blocks = 5  # of which not all lie in slots at once
    plan = plan_of(num_blocks=num_blocks, method="hift", precision="mixed_hi", weights="host", resident_bytes=0)
    of_block = 2 * (IN_BLOCK + 2 * HIDDEN)
    for update in plan.updates:
        # A block that trained before lies in its slot.
        assert update.forward(1).copied("inbound", "parameters") == (num_blocks - update.num_blocks) * of_block
    # At the end of a forward the uppermost two are there, and one more that trains or, for the embedding, another.
    embedding, *blocks, head = (each.backward(1).copied("inbound", "parameters") / of_block for each in plan.updates)
    assert (embedding, blocks[0], head) == (2, 2, 0)
    assert blocks == sorted(blocks, reverse=True)  # loads ahead count with the block above


@pytest.mark.parametrize("shape", [(40, 17), (3, 40, 17)])
@pytest.mark.parametrize("passes", [TilePasses(), CompiledPasses()], ids=["operators", "compiled"])
def test_one_tile_of_each_shape_stands_for_all(shape: tuple[int, ...], passes: TilePasses) -> None:
    group = {"lr": 1e-2, "weight_decay": 0.1, "clip_threshold": 1.0, "decay_rate": -0.8, "eps": (1e-30, 1e-3)}
    found = []
    with (
        mock.patch.object(tiled_steps, "TILE_ELEMENTS", 300),
        mock.patch.object(compiled_passes, "TILE_ELEMENTS", 300),
    ):
        for is_fake in (True, False):
            counter = WorkCounter()
            with without_data() if is_fake else nullcontext(), counter.counting("part"):
                weight, gradient = (torch.ones(shape, dtype=torch.bfloat16) for _ in range(2))
                rounding = StochasticRounding(seed=0, update=0).of("weight")
                step_in_tiles(TransformersRule(passes), {}, group, weight, gradient, rounding)
            work = counter.work_of("part")
            # What all tiles share is made once.
            num_tiles = sum(work.tiles.values())
            assert num_tiles > 15 if is_fake else num_tiles == 2 * (type(passes) is TilePasses)
            of_tiles = Counter({(0, sum(cost)): 0 for cost in work.tiles})
            for cost, count in work.tiles.items():
                of_tiles[0, sum(cost)] += count
            found.append(work.operators + of_tiles)
    # A fake step stacks fewer norms.
    differing = (found[0] - found[1]) + (found[1] - found[0])
    assert sum(differing.values()) <= 4 and sum(found[1].values()) > 30
