"""fp16 weights under DeepSpeed's loss scaler: one scaler for all groups, and a skipped step is no turn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, exact_sums
from tests.parallel.zero.runs import CAP, Case, Run, reference

pytestmark = pytest.mark.slow

STEPS = 14


def case_of(stage: int) -> Case:
    return Case(stage=stage, bare=True, dtype=torch.float16, steps=STEPS)


@dataclass
class Attempt:
    """One call of `engine.step`."""

    update: int
    group: int
    scale: float
    applied: bool
    unchanged: bool
    """Whether the group's masters kept their bits on this rank."""


def train(rank: int, num_ranks: int, stage: int, folder: str) -> dict[str, Any]:
    import deepspeed

    # DeepSpeed refuses fp16 on a CPU, whose kernels can do it.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    run = Run(case_of(stage), rank, num_ranks)
    attempts: list[Attempt] = []
    while run.hift.updates < STEPS and len(attempts) < 80:
        update, group = run.hift.updates, run.hift.active_group
        scale = float(run.engine.optimizer.loss_scale)
        before = [master.detach().clone() for master in run.group_schedule.mover(group).masters]
        run.train(1)
        after = run.group_schedule.mover(group).masters
        same = all(torch.equal(a, b.detach()) for a, b in zip(before, after, strict=True))
        attempts.append(Attempt(update, group, scale, run.engine.was_step_applied(), same))
    run.engine.save_checkpoint(folder)
    masters, scalers = run.masters(), {id(child.loss_scaler) for child in run.group_schedule.children.values()}
    scale = float(run.engine.optimizer.loss_scale)
    run.close()
    resumed = Run(case_of(stage), rank, num_ranks)
    resumed.engine.load_checkpoint(folder)
    resumed_scales = {float(child.loss_scale) for child in resumed.group_schedule.children.values()}
    resumed_scalers = {id(child.loss_scaler) for child in resumed.group_schedule.children.values()}
    resumed.close()
    return {
        "attempts": attempts,
        "masters": masters,
        "scalers": [len(scalers), len(resumed_scalers)],
        "scales": [{scale}, resumed_scales],
    }


@pytest.fixture(scope="module", params=[1, 2, 3])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    folder = str(tmp_path_factory.mktemp("fp16"))
    return request.param, run_ranks(train, 2, request.param, folder, env={"DS_ACCELERATOR": "cpu"}, timeout_s=600)


def test_a_skipped_step_changes_nothing_and_keeps_the_turn(trained: tuple[int, list[Any]]) -> None:
    for rank in trained[1]:
        attempts: list[Attempt] = rank["attempts"]
        skipped = [each for each in attempts if not each.applied]
        assert skipped, "the first scale must be too large, or nothing is tested"
        assert all(each.unchanged for each in skipped)
        updates = [each.update for each in attempts]
        for each, following in pairwise(attempts):
            assert following.update == each.update + each.applied
            assert each.group == each.update % 6
        assert updates[-1] == STEPS - 1


def test_all_groups_share_one_scaler_also_after_loading(trained: tuple[int, list[Any]]) -> None:
    for rank in trained[1]:
        assert rank["scalers"] == [1, 1]
        assert rank["scales"][0] == rank["scales"][1]
        # Every group would look for its own scale, and skip about as many steps each.
        assert sum(not each.applied for each in rank["attempts"]) <= 16


def test_masters_equal_one_process_with_the_same_scales(trained: tuple[int, list[Any]]) -> None:
    stage, ranks = trained
    first, second = ([each.scale for each in rank["attempts"] if each.applied] for rank in ranks)
    assert first == second
    expected = reference(case_of(stage), 2, first)
    # fp16 gradients of either side are rounded in the same places.
    if stage == 3:
        with exact_sums():
            exact = reference(case_of(stage), 2, first)
        for rank in ranks:
            assert_step_close(rank["masters"], expected.masters, exact.masters, cap=CAP)
    else:
        assert all(differing(rank["masters"], expected.masters) == [] for rank in ranks)
