"""HiFT on ZeRO-1, 2 and 3, under accelerate and bare, against one process that computes every rank's rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.helpers.models import differing
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.slow import asked_for, quick
from tests.helpers.tolerance import assert_step_close, exact_sums, sum_limit, with_exact
from tests.parallel.zero.runs import CAP, LOSS_CAP, Case, Run, largest_difference, reference

STAGES = (1, 2, 3)
CPU = {"DS_ACCELERATOR": "cpu"}
BLOCKS = 4


def cases_of(stage: int) -> dict[str, Case]:
    accumulated = {
        "stage": stage, "steps": 20, "accumulation": 2, "clip": 0.05, "layers_per_group": 2, "steps_per_group": 3
    }  # fmt: skip
    streamed = {"partitioned from the start, weights on the CPU": Case(stage=3, bare=True, streamed_weights=True)}
    return {
        **(streamed if stage == 3 else {}),
        "under accelerate": Case(stage=stage),
        "bare, tied, decay split, random order, DeepSpeed's schedule": Case(
            stage=stage, bare=True, tied=True, split_decay=True, order="random", config_schedule=True
        ),
        "accumulated, clipped, three steps a group, checkpointed": Case(**accumulated, checkpointing=False),
        "bare, accumulated, clipped, three steps a group, state on the device": Case(
            **accumulated, bare=True, state="device"
        ),
        # DeepSpeed accumulates bf16 in fp32 from stage 2 on; stage 1 would use its BF16_Optimizer, which is refused.
        "bf16, checkpointed by re-entering": Case(
            stage=stage,
            bare=True,
            dtype=torch.bfloat16,
            checkpointing=True,
            accumulation=1 if stage == 1 else 2,
            accumulate_fp32=stage > 1,
        ),
        "bf16 under accelerate, DeepSpeed's schedule": Case(stage=stage, dtype=torch.bfloat16, config_schedule=True),
    }


RUNS = tuple((stage, name) for stage in STAGES for name in cases_of(stage))
QUICK = (
    "under accelerate",
    "accumulated, clipped, three steps a group, checkpointed",
    "bf16, checkpointed by re-entering",
)


@dataclass
class Outcome:
    """What a run came to on one rank."""

    masters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    losses: list[float]
    num_switches: int
    overhead_seconds: float
    """Of all switches, without the copies."""
    seconds: float
    """Of the whole run."""
    reached: list[tuple[int, frozenset[int]]]
    """At each micro-batch: the active group, and the blocks that backward went through."""
    learning_rates: list[float]
    """What the schedule showed, and in the last place what was held."""


def train_all(rank: int, num_ranks: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    outcomes = {}
    for name, case in cases.items():
        run = Run(case, rank, num_ranks)
        reached: list[tuple[int, frozenset[int]]] = []

        def note(run: Run = run, reached: list[tuple[int, frozenset[int]]] = reached) -> None:
            reached.append((run.group_schedule.active, frozenset(run.backward_reached)))
            run.backward_reached.clear()

        began = time.perf_counter()
        run.train(case.steps, note)
        seconds = time.perf_counter() - began
        outcomes[name] = Outcome(
            masters=run.masters(),
            weights=run.weights(),
            losses=run.losses,
            num_switches=run.group_schedule.num_switches,
            overhead_seconds=run.group_schedule.switch_seconds - run.group_schedule.copy_seconds,
            seconds=seconds,
            reached=reached,
            learning_rates=[group["lr"] for group in run.optimizer.param_groups] + run.hift.held_lr[:1],
        )
        run.close()
    return outcomes


Outcomes = Callable[[int], list[dict[str, Outcome]]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """The outcomes of a stage's runs by rank and case; each stage is spawned once, for the cases that are asked for."""
    asked = asked_for(request, "stage", "name")
    known: dict[int, list[dict[str, Outcome]] | RankError] = {}

    def of_stage(stage: int) -> list[dict[str, Outcome]]:
        if stage not in known:
            try:
                cases = {name: case for name, case in cases_of(stage).items() if (stage, name) in asked}
                known[stage] = run_ranks(train_all, 2, cases, env=CPU, timeout_s=600)
            except RankError as error:
                known[stage] = error
        outcome = known[stage]
        if isinstance(outcome, RankError):
            raise outcome
        return outcome

    return of_stage


@pytest.mark.parametrize(("stage", "name"), quick(RUNS, [run for run in RUNS if run[1] in QUICK]))
def test_masters_equal_one_process_on_the_whole_batch(stage: int, name: str, outcomes: Outcomes) -> None:
    case = cases_of(stage)[name]
    expected = reference(case, 2)
    if case.has_one_order:
        for outcome in (each[name] for each in outcomes(stage)):
            assert differing(outcome.masters, expected.masters) == []
            # The ranks' losses are summed in fp32.
            assert outcome.losses == pytest.approx(expected.losses, rel=sum_limit(2, torch.float32))
    else:
        with exact_sums():
            exact = reference(case, 2)
        for outcome in (each[name] for each in outcomes(stage)):
            assert_step_close(outcome.masters, expected.masters, exact.masters, cap=CAP)
            assert_step_close(outcome.losses, expected.losses, exact.losses, cap=LOSS_CAP)
    if case.clip:
        assert expected.smallest_norm > case.clip, "nothing was clipped"


@pytest.mark.parametrize(("stage", "name"), quick(RUNS, [run for run in RUNS if run[1] in QUICK]))
def test_weights_are_the_rounded_masters_on_every_rank(stage: int, name: str, outcomes: Outcomes) -> None:
    dtype = cases_of(stage)[name].dtype
    for outcome in (each[name] for each in outcomes(stage)):
        rounded = {key: value.to(dtype) for key, value in outcome.masters.items()}
        assert all(value.dtype == dtype for value in outcome.weights.values())
        assert largest_difference(outcome.weights, rounded) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_every_weight_was_updated(stage: int, outcomes: Outcomes) -> None:
    from tests.parallel.zero.runs import make_model

    for name, outcome in outcomes(stage)[0].items():
        before = dict(make_model(cases_of(stage)[name]).named_parameters())
        after = outcome.masters
        assert all(bool((after[key] - before[key].detach().float()).abs().max() > 1e-3) for key in before)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_stops_at_the_active_group(stage: int, outcomes: Outcomes) -> None:
    for name, outcome in outcomes(stage)[0].items():
        case = cases_of(stage)[name]
        if case.checkpointing:
            continue  # re-entering needs gradients at the bottom
        for group, blocks in outcome.reached:
            lowest = max(0, group * case.layers_per_group - 1)
            assert blocks == frozenset(range(lowest, BLOCKS)), (name, group)


@pytest.mark.parametrize("stage", STAGES)
def test_the_turn_changes_every_steps_per_group_updates(stage: int, outcomes: Outcomes) -> None:
    for name, outcome in outcomes(stage)[0].items():
        case = cases_of(stage)[name]
        groups = [group for group, _ in outcome.reached[:: case.accumulation]]
        num_groups = -(-(BLOCKS + 2) // case.layers_per_group)
        group_schedule = groups[:: case.steps_per_group]
        assert groups == [group_schedule[update // case.steps_per_group] for update in range(case.steps)]
        assert sorted(group_schedule[:num_groups]) == list(range(num_groups))
        assert group_schedule == [group_schedule[index % num_groups] for index in range(len(group_schedule))]
        assert (group_schedule[:num_groups] == list(range(num_groups))) == (case.order == "bottom2up")
        assert outcome.num_switches == len(group_schedule) - 1


@pytest.mark.parametrize("stage", STAGES)
def test_param_groups_show_the_schedule_and_held_lr_what_is_applied(stage: int, outcomes: Outcomes) -> None:
    for name, outcome in outcomes(stage)[0].items():
        *shown, held = outcome.learning_rates
        assert len(set(shown)) == 1 and shown[0] != held, name


@pytest.mark.parametrize("stage", STAGES)
def test_switches_take_a_small_part_of_a_run_beyond_the_copies(stage: int, outcomes: Outcomes) -> None:
    # `benchmarks/ranks.py` measures the milliseconds; here it is their share of the same run, whatever else the machine
    # does: a hundredth or two, in steps of a tiny model that are short themselves.
    shares = {
        name: min(rank[name].overhead_seconds / rank[name].seconds for rank in outcomes(stage))
        for name in outcomes(stage)[0]
    }
    print(f"stage {stage}:", {name: f"{share:.3f}" for name, share in shares.items()})
    assert min(shares.values()) < 0.1


def train_one(rank: int, num_ranks: int, case: Case) -> dict[str, Any]:
    run = Run(case, rank, num_ranks)
    run.train(case.steps)
    return {"masters": run.masters(), "weights": run.weights(), "losses": run.losses}


def test_three_ranks_equal_one_process_as_well() -> None:
    case = Case(stage=2, split_decay=True, num_ranks=3)
    expected, exact = with_exact(lambda: reference(case, 3))
    for outcome in run_ranks(train_one, 3, case, env=CPU, timeout_s=600):
        # Sums over three ranks have several orders.
        assert_step_close(outcome["masters"], expected.masters, exact.masters, cap=CAP)
        assert largest_difference(outcome["masters"], outcome["weights"]) == 0
