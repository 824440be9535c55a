import threading
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from slivertune.core import masking
from slivertune.core.masking import MASK
from slivertune.training.ranks import coordinator as module
from slivertune.training.ranks.coordinator import LaunchCoordinator, SilentError, join_launch

RANKS = 3


def on_each(act: Callable[[LaunchCoordinator], Any], *, one_machine: bool = True) -> list[Any]:
    """What `act` returns or raises on three processes, played by threads."""
    store = dist.HashStore()

    def play(rank: int) -> Any:
        try:
            return act(LaunchCoordinator(rank, RANKS, rank if one_machine else 0, store))
        except Exception as error:
            return error

    with ThreadPool(RANKS) as processes:
        # A process that waits for what never comes ends the test.
        return processes.map_async(play, range(RANKS), chunksize=1).get(timeout=30)


def test_a_process_alone_decides_acts_and_reports_for_itself() -> None:
    coordinator = LaunchCoordinator()
    assert coordinator.is_first and coordinator.name == ""
    coordinator.agree_on("arguments", 1)
    assert coordinator.decide("folder", lambda: 7) == 7
    assert coordinator.first_here("data", lambda: 8) == 8
    assert coordinator.owns_error("it broke")
    coordinator.reach(1)
    coordinator.publish_error("it broke")


def test_what_all_share_is_agreed_on() -> None:
    assert on_each(lambda coordinator: coordinator.agree_on("arguments", ["--seed", "1"])) == [None] * RANKS


def test_what_differs_is_named_on_every_process() -> None:
    outcomes = on_each(lambda coordinator: coordinator.agree_on("arguments", coordinator.rank // 2))
    text = "the processes were given different arguments: rank 0 0, rank 2 1. Start all of them alike"
    assert [(type(each), str(each)) for each in outcomes] == [(ValueError, text)] * RANKS


SECRETS = [f"token-of-rank-{rank}" for rank in range(RANKS)]


def disagreement(words: Callable[[int], list[str]]) -> str:
    """Return what each process says where a rank has these words; no secret may be in it."""
    first, *others = on_each(lambda coordinator: coordinator.agree_on("arguments", words(coordinator.rank)))
    assert isinstance(first, ValueError) and [str(each) for each in others] == [str(first)] * len(others)
    assert [each for each in SECRETS if each in str(first)] == []
    return str(first)


@pytest.mark.parametrize("words", [["--hub_token", "{}"], ["--hub-token={}"]], ids=str)
def test_what_differs_is_named_without_secrets(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())
    hidden = [word.format(MASK) for word in words]
    said = disagreement(lambda rank: [word.format(SECRETS[rank]) for word in words])
    assert said.endswith(f"arguments: rank 0 {hidden}, rank 1 {hidden}, rank 2 {hidden}. Start all of them alike")


def test_each_process_hides_the_secrets_that_it_alone_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = threading.local()

    def words(rank: int) -> list[str]:
        known.secret = SECRETS[rank]
        return ["--run_name", SECRETS[rank]]

    monkeypatch.setattr(module, "masked", lambda value: [word.replace(known.secret, MASK) for word in value])
    assert disagreement(words).count(MASK) == RANKS


def test_the_first_decides_for_all() -> None:
    asked: list[int] = []

    def act(coordinator: LaunchCoordinator) -> str:
        return coordinator.decide(
            "folder", lambda: (asked.append(coordinator.rank), f"chosen by {coordinator.rank}")[1]
        )

    assert on_each(act) == ["chosen by 0"] * RANKS
    assert asked == [0]


def test_one_of_a_machine_goes_before_the_others() -> None:
    done: list[int] = []

    def do(coordinator: LaunchCoordinator) -> int:
        if coordinator.rank == 0:
            time.sleep(0.3)
        done.append(coordinator.rank)
        return coordinator.rank

    assert on_each(lambda coordinator: coordinator.first_here("data", lambda: do(coordinator))) == [0, 1, 2]
    assert done[0] == 0
    done.clear()
    # Each of these is the first of its machine, and waits for nobody.
    on_each(lambda coordinator: coordinator.first_here("data", lambda: do(coordinator)), one_machine=False)
    assert done[-1] == 0


@pytest.mark.parametrize("name", ["decide", "first_here"])
def test_those_who_wait_for_one_that_fails_fail_in_silence(name: str) -> None:
    fail = Mock(side_effect=OSError("no room"))
    first, *others = on_each(lambda coordinator: getattr(coordinator, name)("data", fail))
    assert isinstance(first, OSError)
    assert all(isinstance(each, SilentError) for each in others)


def test_the_first_alone_says_what_all_have_met() -> None:
    def act(coordinator: LaunchCoordinator) -> bool:
        time.sleep(0.2 * (coordinator.rank == 0))
        owns_error = coordinator.owns_error("unknown option")
        coordinator.publish_error("unknown option")
        return owns_error

    assert on_each(act) == [True, False, False]


def test_another_says_what_the_first_has_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)

    def act(coordinator: LaunchCoordinator) -> bool:
        if coordinator.is_first:
            coordinator.publish_error("no room on rank 0")
        return coordinator.owns_error(f"no room on rank {coordinator.rank}")

    assert on_each(act) == [True, True, True]


@pytest.mark.parametrize("stage", [0, 1])
def test_one_that_fails_where_the_first_has_passed_reports_at_once(stage: int) -> None:
    def act(coordinator: LaunchCoordinator) -> float:
        coordinator.reach(stage)
        if coordinator.is_first:
            coordinator.reach(stage + 1)
            return 0.0
        began = time.monotonic()
        assert coordinator.owns_error("a file is missing here")
        return time.monotonic() - began

    assert max(on_each(act)) < module._START_PATIENCE_S / 2, "it waited as if the first said nothing"


def test_one_that_fails_in_training_reports_when_the_first_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)

    def act(coordinator: LaunchCoordinator) -> bool | None:
        coordinator.reach(2)
        return None if coordinator.is_first else coordinator.owns_error("out of memory")

    assert on_each(act) == [None, True, True]
    assert LaunchCoordinator(2, RANKS, 2, dist.HashStore()).name == " on rank 2"


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_without_a_launcher_there_are_no_others(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert join_launch().world_size == 1
