"""HiFT on DeepSpeed where ranks miss something: groups that no batch reaches, other rates, a rank that is gone."""

from __future__ import annotations

import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slivertune
from slivertune import HiFT, HiFTConfig
from slivertune.parallel.consistency.timeouts import keeping_timeout, timeout_of
from tests.helpers.models import weights
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.launched import whole
from tests.parallel.reference import ADAMW, largest_difference
from tests.parallel.test_unreached_groups import LAYERS, STEPS, Reference, alike, make_input, make_model, on_one_rank
from tests.parallel.zero.runs import Case, make_accelerator, quiet
from tests.parallel.zero.test_hift import CPU

LIMIT = 6
"""Seconds that the user gives a collective."""


class Training:
    def __init__(self, rank: int, stage: int) -> None:
        self.rank = rank
        self.accelerator = make_accelerator(Case(stage=stage))
        model = make_model()
        self.hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig(layers=LAYERS), **ADAMW)
        self.engine, self.optimizer = slivertune.prepare(self.accelerator, model, self.hift)

    def update(self, step: int, used: Any) -> None:
        self.accelerator.backward(self.engine(make_input(step, 0, self.rank), used(step, 0, self.rank)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(parameter).float() for name, parameter in self.engine.module.named_parameters()}


def message_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def skip_and_resume(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    quiet()
    warnings.filterwarnings("ignore", "no (gradient|batch of a whole cycle) reached")
    found: dict[str, Any] = {}
    import deepspeed

    # As of a model that is born in parts: DeepSpeed makes its group before the engine, with torch's own default.
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.utils.groups._clone_world_group()
    for stage in (1, 2, 3):
        training = Training(rank, stage)
        timeouts = {timeout_of(group) for group in dist.distributed_c10d._world.pg_map}
        for step in range(STEPS):
            if step == 7:
                training.engine.save_checkpoint(f"{folder}/{stage}")
            training.update(step, alike)
        trained = training.weights()
        again = Training(rank, stage)
        again.engine.load_checkpoint(f"{folder}/{stage}")
        for step in range(7, STEPS):
            again.update(step, alike)
        reference = Reference(alike)
        found[f"{stage}"] = {
            "weights": trained,
            "resumed": largest_difference(trained, again.weights()),
            "updates": (training.hift.updates, again.hift.updates, reference.updates),
            "skipped": (training.hift.skipped_turns, again.hift.skipped_turns, reference.skipped),
            "timeouts": timeouts,
        }

        def other_rates(training: Training = again) -> None:
            training.optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
            for step in range(4):
                training.update(step, lambda *_: frozenset({0, 1}))

        found[f"{stage}"]["rates"] = message_of(other_rates)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("skipped"))
    return run_ranks(skip_and_resume, 2, folder, env=CPU, timeout_s=300, collective_timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_group_that_no_rank_reached_is_skipped_and_a_resumed_run_knows_it(
    found: list[dict[str, Any]], stage: str
) -> None:
    expected, exact = with_exact(lambda: weights(Reference(alike).model))
    for each in found:
        assert each[stage]["skipped"][0] == each[stage]["skipped"][1] == each[stage]["skipped"][2] != {}
        assert len(set(each[stage]["updates"])) == 1
        # A step too many or too few moves weights by 1e-2.
        assert_step_close(each[stage]["weights"], expected, exact, cap=1e-5)
        assert each[stage]["resumed"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_rates_that_differ_are_never_applied(found: list[dict[str, Any]], stage: str) -> None:
    for each in found:
        assert "the learning rate of param group 0 is 0.01 on rank 0, 0.02 on rank 1" in each[stage]["rates"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_every_process_group_of_the_engine_has_the_users_timeout(found: list[dict[str, Any]], stage: str) -> None:
    assert all(each[stage]["timeouts"] == {timedelta(seconds=60)} for each in found)


def lose_a_rank(rank: int, num_ranks: int, how: str) -> tuple[str, float]:
    quiet()
    training = Training(rank, 2)
    began = [0.0]

    def train() -> None:
        for step in range(6):
            began[0] = time.monotonic()
            if step == 2 and rank == 1:
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if how == "dead":
                    os._exit(1)
            used = on_one_rank if how == "elsewhere" else (lambda *_: frozenset({0, 1}))
            training.update(step, used)

    return message_of(train), time.monotonic() - began[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stopped", "rank 1 is stopped (SIGSTOP, or a debugger)"),
        ("dead", "rank 1 has ended"),
        ("elsewhere", "rank 0 is averaging gradients at update 2, group 2, without a gradient; rank 1 is"),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_within_the_users_timeout(how: str, said: str) -> None:
    message, seconds = run_ranks(lose_a_rank, 2, how, env=CPU, may_die=(1,), timeout_s=90, collective_timeout_s=LIMIT)[
        0
    ]
    assert said in message
    assert seconds < LIMIT + 30  # and the few seconds in which it looks for the others


def test_groups_that_were_there_before_keep_their_timeout(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    with keeping_timeout():  # on one process without a group there is nothing to keep
        pass
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1, timeout=timedelta(seconds=17)
    )
    try:
        own = dist.new_group([0], timeout=timedelta(seconds=5))
        with keeping_timeout():
            made = dist.new_group([0])
            assert timeout_of(made) != timedelta(seconds=17)
        assert timeout_of(made) == timedelta(seconds=17)
        assert timeout_of(own) == timedelta(seconds=5)
    finally:
        dist.destroy_process_group()
