"""fp16 weights under DeepSpeed's loss scaler: one scaler for all groups, and a skipped step is no turn."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slivertune.core.layout import Layout
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close
from tests.parallel.contract.hift import CAP, CYCLE, HiFTCase, gathered, reference
from tests.parallel.contract.runs import ZERO, Run, load, running, save

pytestmark = pytest.mark.slow

STEPS = 14


FP16 = HiFTCase(updates=STEPS, bare=True, dtype=torch.float16)
CASES = {layout: replace(FP16, eps=1e-4 if layout == "zero3" else 1e-8) for layout in ZERO}


@dataclass
class Attempt:
    """One call of `engine.step`."""

    update: int
    group: int
    scale: float
    applied: bool
    unchanged: bool
    """Whether the group's masters kept their bits on this rank."""


def train(rank: int, num_ranks: int, layout: Layout, folder: Path) -> dict[str, Any]:
    import deepspeed

    # DeepSpeed refuses fp16 on a CPU, whose kernels can do it.
    with mock.patch.object(deepspeed.accelerator.get_accelerator(), "is_fp16_supported", return_value=True):
        return train_and_load(rank, layout, folder)


def train_and_load(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    attempts: list[Attempt] = []
    with running(CASES[layout], layout, rank) as run:
        schedule = run.model.hift_schedule
        while run.sliver.updates < STEPS and len(attempts) < 80:
            update, group = run.sliver.updates, run.sliver.active_group
            scale = float(run.model.optimizer.loss_scale)
            before = [master.detach().clone() for master in schedule.movers[group].masters]
            run.train(update, update + 1)
            pairs = zip(before, schedule.movers[group].masters, strict=True)
            same = all(torch.equal(a, b.detach()) for a, b in pairs)
            attempts.append(Attempt(update, group, scale, run.model.was_step_applied(), same))
        save(run, folder)
        found = {"attempts": attempts, "masters": gathered(run.model), "trained": scalers_of(run)}
    with running(CASES[layout], layout, rank) as run:
        load(run, folder)
        return {**found, "loaded": scalers_of(run)}


def scalers_of(run: Run) -> tuple[int, set[float]]:
    """How many scalers the groups have, and at what."""
    children = run.model.hift_schedule.children.values()
    return len({id(child.loss_scaler) for child in children}), {float(child.loss_scale) for child in children}


@pytest.fixture(scope="module", params=ZERO)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, list[Any]]:
    folder = tmp_path_factory.mktemp("fp16")
    return request.param, run_ranks(train, 2, request.param, folder)


def test_a_skipped_step_changes_nothing_and_keeps_the_turn(trained: tuple[Layout, list[Any]]) -> None:
    for rank in trained[1]:
        attempts: list[Attempt] = rank["attempts"]
        skipped = [each for each in attempts if not each.applied]
        assert skipped, "the first scale must be too large, or nothing is tested"
        assert all(each.unchanged for each in skipped)
        for each, following in pairwise(attempts):
            assert following.update == each.update + each.applied
            assert each.group == each.update % CYCLE
        assert attempts[-1].update == STEPS - 1


def test_all_groups_share_one_scaler_also_after_loading(trained: tuple[Layout, list[Any]]) -> None:
    for rank in trained[1]:
        assert rank["trained"][0] == 1 and len(rank["trained"][1]) == 1
        assert rank["loaded"] == rank["trained"]
        # Every group would look for its own scale, and skip about as many steps each.
        assert sum(not each.applied for each in rank["attempts"]) <= 16


def test_masters_equal_one_process_with_the_same_scales(trained: tuple[Layout, list[Any]]) -> None:
    layout, ranks = trained
    first, second = (tuple(each.scale for each in rank["attempts"] if each.applied) for rank in ranks)
    assert first == second
    references = [reference(CASES[layout], layout, exact=exact, scales=first) for exact in (False, True)]
    expected, exact = ({name: each.detach() for name, each in one.masters.items()} for one in references)
    # fp16 gradients of either side are rounded in the same places.
    for rank in ranks:
        if layout == "zero3":
            assert_step_close(rank["masters"], expected, exact, cap=CAP)
        else:
            assert differing(rank["masters"], expected) == []
