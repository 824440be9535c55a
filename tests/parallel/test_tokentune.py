"""TokenTune on every layout: each rank draws positions of its own, and the updates are those of one process."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune.core.layout import Layout
from tests.helpers.models import assert_same_tree, differing, weights
from tests.helpers.ranks import quick, ran_once
from tests.helpers.tolerance import assert_step_close, exact_sums
from tests.parallel.contract.runs import LAYOUTS
from tests.parallel.reference import largest_difference
from tests.parallel.tokentune_runs import (
    NUM_GROUPS,
    Outcome,
    Plan,
    Replayed,
    Selections,
    Weights,
    replay,
    replay_forced,
    train,
)
from tests.tokentune.families import HIDDEN, VOCAB

CYCLES = 2 * NUM_GROUPS + 1
PLANS = {
    "dense, checkpointed": Plan(method="adamw", updates=3, checkpointing=False, attach_last=True),
    "LoRA": Plan(method="lora", updates=3),
    "HiFT": Plan(method="hift", updates=CYCLES),
    "HiFT, checkpointed, accumulated, clipped": Plan(
        method="hift", updates=CYCLES, checkpointing=False, accumulation=2, clip=0.2
    ),
    # Three groups: embedding and first block, two blocks, and a norm, since the head's weight is the embedding's.
    "HiFT, tied, three steps a group": Plan(
        method="hift", updates=19, family="llama, tied", layers_per_group=2, steps_per_group=3
    ),
    "HiFT, bf16": Plan(method="hift", updates=CYCLES, dtype=torch.bfloat16),
    "HiFT, mixed precision": Plan(method="hift", updates=CYCLES, mixed_precision="bf16"),
    # Under FSDP2 and ZeRO-3 SFT takes another form when it is prepared, which TokenTune then finds.
    "SFT": Plan(method="sft", updates=CYCLES, attach_last=True),
}
HIFT_PLANS = [name for name, plan in PLANS.items() if plan.method == "hift"]
RESUMED = "HiFT, resumed in mid-cycle"
STOPPED = Plan(method="hift", updates=CYCLES, stop_after=NUM_GROUPS + 2)
ALL = {**PLANS, RESUMED: STOPPED}
QUICK: dict[str, tuple[Layout, ...]] = {
    "LoRA": ("ddp",),
    "HiFT": ("ddp", "zero2", "zero3"),
    "HiFT, checkpointed, accumulated, clipped": ("fsdp2", "zero1"),  # which waits for the last micro-batch
    "SFT": ("fsdp2",),
    RESUMED: ("ddp",),
}
"""The layouts on which `make test` runs a plan; `make test-all` runs each on all."""


def on_layouts(*plans: str) -> pytest.MarkDecorator:
    """Parametrize a test by layouts and plans."""
    runs = [(layout, plan) for layout in LAYOUTS for plan in plans]
    kept = [(layout, plan) for layout, plan in runs if layout in QUICK.get(plan, ())]
    return pytest.mark.parametrize(("ranks", "plan"), quick(runs, kept), indirect=["ranks"])


def run_plan(rank: int, num_ranks: int, layout: Layout, name: str, folder: Path) -> Outcome:
    return train(rank, num_ranks, layout, ALL[name], folder / layout / name)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Two ranks of a layout, which run a plan when they are first asked."""

    layout: Layout
    run: Callable[[Layout, str], list[Outcome]]

    def of(self, plan: str) -> list[Outcome]:
        return self.run(self.layout, plan)

    def drawn(self, plan: str) -> Selections:
        return [outcome["selections"] for outcome in self.of(plan)]

    def has_masters(self, plan: Plan) -> bool:
        """Whether this layout keeps masters beside the weights: ZeRO always, HiFT itself for weights in bf16."""
        return self.layout.startswith("zero") or plan.dtype == torch.bfloat16


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, run_once: Callable[[Layout, str], list[Outcome]]) -> Ranks:
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    return Ranks(layout=request.param, run=run_once)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout, str], list[Outcome]]:
    return ran_once(run_plan, 2, tmp_path_factory.mktemp("plans"))


Replay = Callable[..., Replayed]
WEIGHTS, LOSSES, NORMS = 1e-5, 2e-6, 5e-6
"""What no limit exceeds. Weights move by about 0.1 and, were the ranks' selections exchanged, would be 0.08 off."""


@pytest.fixture(scope="module")
def once() -> Replay:
    """Calls a replay with its arguments; another layout, whose ranks drew the same, gets the same result."""
    known: dict[tuple[Any, ...], Replayed] = {}

    def replayed(
        replay: Replay, plan: Plan, selections: Selections, *more: Any, sums: Callable[[], Any] = nullcontext
    ) -> Replayed:
        drawn = tuple(positions.numpy().tobytes() for rank in selections for positions in rank)
        key = (replay, plan, drawn, sums, *more)
        if key not in known:
            with sums():
                known[key] = replay(plan, selections, *more)
        return known[key]

    return replayed


@on_layouts(*ALL)
def test_the_ranks_select_other_positions_in_every_forward(ranks: Ranks, plan: str) -> None:
    first, second = ranks.drawn(plan)
    settings = ALL[plan]
    assert len(first) == len(second) == settings.updates * settings.accumulation
    assert not any(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def assert_near(outcomes: list[Outcome], expected: Replayed, exact: Replayed) -> None:
    for rank, outcome in enumerate(outcomes):
        assert_step_close(outcome["losses"], expected.losses[rank], exact.losses[rank], cap=LOSSES)
        assert_step_close(outcome["weights"], expected.weights, exact.weights, cap=WEIGHTS)
        if expected.norms:
            assert_step_close(outcome["norms"], expected.norms, exact.norms, cap=NORMS)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
@on_layouts(*[name for name, plan in PLANS.items() if not plan.is_bf16])
def test_the_updates_are_those_of_one_process_that_selects_the_same(ranks: Ranks, plan: str, once: Replay) -> None:
    """Both run in fp32. Gradients differ by the order of their sums, of which Adam's step takes lr / eps = 2."""
    outcomes, drawn = ranks.of(plan), ranks.drawn(plan)
    expected, exact = once(replay, PLANS[plan], drawn), once(replay, PLANS[plan], drawn, sums=exact_sums)
    assert min(expected.norms, default=1.0) > (PLANS[plan].clip or 0.0), "nothing was clipped"
    assert_near(outcomes, expected, exact)
    assert differing(outcomes[0]["weights"], outcomes[1]["weights"]) == []


def has_one_order(layout: Layout, plan: Plan) -> bool:
    """Whether each sum has one order, as a mean of two has, in bf16 too.

    Micro-batches are summed before or after the ranks are, norms over shards, and stage 3's gradients in pieces.
    """
    return layout == "ddp" or (layout != "zero3" and plan.accumulation == 1 and plan.clip is None)


@on_layouts(*HIFT_PLANS)
def test_hift_on_ranks_rounds_as_one_process_does_on_which_its_selections_are_forced(
    ranks: Ranks, plan: str, once: Replay
) -> None:
    outcomes, settings = ranks.of(plan), PLANS[plan]
    is_mixed = settings.mixed_precision == "bf16"
    run = (replay_forced, settings, ranks.drawn(plan), *([ranks.layout] if is_mixed else []))
    expected = once(*run)
    # FSDP2's policy rounds what the model returns as well.
    returned = torch.bfloat16 if is_mixed and ranks.layout == "fsdp2" else torch.float32
    # Where both ranks know a row, either's counts once.
    orders = (outcomes, outcomes[::-1]) if ranks.has_masters(settings) else ()
    masters = [put_together(order, expected.masters) for order in orders]
    if has_one_order(ranks.layout, settings):
        for outcome, losses in zip(outcomes, expected.losses, strict=True):
            assert differing(outcome["weights"], expected.weights) == []
            assert outcome["norms"] == expected.norms
            assert outcome["losses"] == torch.tensor(losses).to(returned).tolist()
        assert all(differing(each, expected.masters) == [] for each in masters)
    else:
        exact = once(*run, sums=exact_sums)
        assert_near(outcomes, expected, exact)
        for each in masters:
            assert_step_close(each, expected.masters, exact.masters, cap=WEIGHTS)
    if not masters:
        assert all(not outcome["masters"] for outcome in outcomes)


def put_together(outcomes: list[Outcome], shapes: Weights) -> Weights:
    """Whole masters from the ranks' rows, the later rank's where both have them; no numbers where none has."""
    found = {name: torch.full_like(master, math.nan) for name, master in shapes.items()}
    for outcome in outcomes:
        for name, (first, rows) in outcome["masters"].items():
            found[name][first : first + len(rows)] = rows
    return found


@on_layouts(*HIFT_PLANS)
def test_every_weight_is_updated_in_at_least_two_cycles(ranks: Ranks, plan: str) -> None:
    settings = PLANS[plan]
    assert settings.updates > 2 * (-(-NUM_GROUPS // settings.layers_per_group)) * settings.steps_per_group
    before = weights(settings.build_model())
    for outcome in ranks.of(plan):
        changed = {
            name: float((outcome["weights"][name].float() - before[name].float()).abs().max()) for name in before
        }
        assert min(changed.values()) > 1e-3, changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("HiFT, checkpointed, accumulated, clipped", {"clip": None}),
        ("HiFT, tied, three steps a group", {"steps_per_group": 1}),
        ("HiFT, tied, three steps a group", {"layers_per_group": 1}),
        ("HiFT, bf16", {"dtype": torch.float32}),
        ("HiFT, mixed precision", {"mixed_precision": "no"}),
    ],
)
def test_another_setting_would_be_seen(ranks: Ranks, plan: str, other: dict[str, Any], once: Replay) -> None:
    expected = once(replay_forced, replace(PLANS[plan], **other), ranks.drawn(plan))
    assert largest_difference(ranks.of(plan)[0]["weights"], expected.weights) > 1e-3


def test_another_selection_would_be_seen(ranks: Ranks, once: Replay) -> None:
    expected = once(replay, PLANS["HiFT"], ranks.drawn("HiFT")[::-1])
    assert largest_difference(ranks.of("HiFT")[0]["weights"], expected.weights) > 1e-2


@on_layouts(RESUMED)
def test_a_resumed_run_draws_and_updates_as_if_it_had_not_stopped(ranks: Ranks, plan: str) -> None:
    for resumed, uninterrupted in zip(ranks.of(plan), ranks.of("HiFT"), strict=True):
        assert_same_tree(resumed["selections"], uninterrupted["selections"])
        assert differing(resumed["weights"], uninterrupted["weights"]) == []


@on_layouts("LoRA", "HiFT")
def test_zero3_holds_one_module_at_a_time_whole_in_the_backward_too(ranks: Ranks, plan: str) -> None:
    """A module that ran twice, the second time without a graph, would stay gathered to the end of the backward."""
    gathered = [outcome["most gathered"] for outcome in ranks.of(plan)]
    assert gathered == [VOCAB * HIDDEN if ranks.layout == "zero3" else 0] * 2


def test_hift_ran_on_the_engine_of_its_layout(ranks: Ranks) -> None:
    engines = {"ddp": "LlamaForCausalLM", "fsdp2": "FSDPLlamaForCausalLM"}
    assert [outcome["engine"] for outcome in ranks.of("HiFT")] == [engines.get(ranks.layout, "DeepSpeedEngine")] * 2
