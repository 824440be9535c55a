"""TokenTune on every layout: each rank draws positions of its own, and the updates are those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
import torch

from slivertune.parallel.layout import Layout
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.parallel.tokentune_runs import NUM_GROUPS, Outcome, Plan, Weights, replay, run_layout
from tests.tokentune.families import HIDDEN, VOCAB

CYCLES = 2 * NUM_GROUPS + 1
PLANS = {
    "dense, checkpointed": Plan(method="adamw", num_updates=3, checkpointing=True, attach_last=True),
    "LoRA": Plan(method="lora", num_updates=3),
    "HiFT": Plan(method="hift", num_updates=CYCLES),
    "HiFT, checkpointed, accumulated": Plan(method="hift", num_updates=CYCLES, checkpointing=True, accumulation=2),
    # Under FSDP2 and ZeRO-3 SFT takes another form when it is prepared, which TokenTune then finds.
    "SFT": Plan(method="sft", num_updates=CYCLES, attach_last=True),
}
RESUMED = "HiFT, resumed in mid-cycle"
STOPPED = Plan(method="hift", num_updates=CYCLES, stop_after=NUM_GROUPS + 2)
LAYOUTS: tuple[Layout, ...] = tuple(layout for layout in get_args(Layout) if layout != "single")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What two ranks of a layout had, by plan."""

    layout: Layout
    outcomes: list[dict[str, Outcome]]

    def of(self, plan: str) -> list[Outcome]:
        return [outcome[plan] for outcome in self.outcomes]


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    layout: Layout = request.param
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp(layout)
    plans = {**PLANS, RESUMED: STOPPED}
    outcomes = run_ranks(run_layout, 2, layout, plans, str(folder), env={"DS_ACCELERATOR": "cpu"}, timeout_s=240)
    return Ranks(layout=layout, outcomes=outcomes)


def distance(left: Weights, right: Weights) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("plan", [*PLANS, RESUMED])
def test_the_ranks_select_other_positions_in_every_forward(ranks: Ranks, plan: str) -> None:
    first, second = (outcome.selections for outcome in ranks.of(plan))
    settings = {**PLANS, RESUMED: STOPPED}[plan]
    assert len(first) == len(second) == settings.num_updates * settings.accumulation
    assert not any(torch.equal(left, right) for left, right in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
@pytest.mark.parametrize("plan", PLANS)
def test_the_updates_are_those_of_one_process_that_selects_the_same(ranks: Ranks, plan: str) -> None:
    """Both run in fp32. Gradients differ by some 1e-7, the rounding of sums in another order, of which Adam's step
    takes lr / eps = 2; weights move by about 0.1 and, were the ranks' selections exchanged, would be 0.08 off.
    """
    outcomes = ranks.of(plan)
    weights, losses = replay(PLANS[plan], [outcome.selections for outcome in outcomes])
    for outcome, expected in zip(outcomes, losses, strict=True):
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(expected), rtol=0.0, atol=1e-5)
        assert distance(outcome.weights, weights) <= 2e-6
    assert differing(outcomes[0].weights, outcomes[1].weights) == []


def test_another_selection_would_be_seen(ranks: Ranks) -> None:
    outcomes = ranks.of("HiFT")
    weights, _ = replay(PLANS["HiFT"], [outcome.selections for outcome in reversed(outcomes)])
    assert distance(outcomes[0].weights, weights) > 1e-2


def test_a_resumed_run_draws_and_updates_as_if_it_had_not_stopped(ranks: Ranks) -> None:
    for resumed, uninterrupted in zip(ranks.of(RESUMED), ranks.of("HiFT"), strict=True):
        for left, right in zip(resumed.selections, uninterrupted.selections, strict=True):
            assert torch.equal(left, right)
        assert differing(resumed.weights, uninterrupted.weights) == []


def test_zero3_holds_one_module_at_a_time_whole_in_the_backward_too(ranks: Ranks) -> None:
    """A module that ran twice, the second time without a graph, would stay gathered to the end of the backward."""
    largest = VOCAB * HIDDEN if ranks.layout == "zero3" else 0
    for plan in ("LoRA", "HiFT"):
        assert [outcome.most_gathered for outcome in ranks.of(plan)] == [largest] * 2


def test_hift_ran_on_the_engine_of_its_layout(ranks: Ranks) -> None:
    engines = {"ddp": "LlamaForCausalLM", "fsdp2": "FSDPLlamaForCausalLM"}
    for outcome in ranks.of("HiFT"):
        assert outcome.engine == engines.get(ranks.layout, "DeepSpeedEngine")
