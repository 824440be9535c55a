import os
import time

import pytest
import torch
import torch.distributed as dist

from slivertune.parallel.consistency.heartbeat import Heartbeat, check_agreement, digest, world_size
from tests.helpers.ranks import RankError, run_ranks
from tests.parallel.contract.runs import message_of


def agree_and_drift(rank: int, num_ranks: int) -> dict[str, str]:
    same = {"seed": 3, "groups": [["a"], ["b"]]}
    check_agreement(same)
    heartbeat = Heartbeat("test")
    heartbeat.enter(5, "group 1")
    heartbeat.compare({"updates": 5, "indices": "abc"})
    return {
        "settings": message_of(lambda: check_agreement({**same, "seed": rank})),
        "missing": message_of(lambda: check_agreement(same if rank else {**same, "extra": 1})),
        "drift": message_of(lambda: heartbeat.compare({"updates": 5 + (rank == 2)})),
    }


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return run_ranks(agree_and_drift, 3)


def test_settings_that_differ_are_named_with_the_value_of_every_rank(messages: list[dict[str, str]]) -> None:
    for each in messages:
        assert each["settings"].startswith("ValueError: the ranks disagree on seed: 0 on rank 0, 1 on rank 1, 2 on")


def test_a_setting_that_one_rank_alone_has_is_named(messages: list[dict[str, str]]) -> None:
    for each in messages:
        assert "the ranks disagree on extra: 1 on rank 0, None on rank 1" in each["missing"]


def test_ranks_that_have_drifted_are_told_where_and_by_what(messages: list[dict[str, str]]) -> None:
    for each in messages:
        assert each["drift"].startswith("RuntimeError: the ranks have drifted apart, at update 5, group 1: updates is")
        assert "6 on rank 2" in each["drift"]


def die_before_the_collective(rank: int, num_ranks: int) -> tuple[str, float]:
    heartbeat = Heartbeat("test")
    heartbeat.enter(7, "group 2")
    if rank == 1:
        time.sleep(1)
        os._exit(1)
    heartbeat.enter(8, "group 0")
    begin = time.monotonic()

    def reduce() -> None:
        with heartbeat.guard("averaging the gradients of group 0"):
            dist.all_reduce(torch.ones(3))

    return message_of(reduce), time.monotonic() - begin


def test_a_rank_that_died_is_named_and_where_it_was_last_seen() -> None:
    message, seconds = run_ranks(die_before_the_collective, 2, may_die=(1,))[0]
    assert "rank 0 failed averaging the gradients of group 0" in message
    assert "this rank is at update 8, group 0" in message
    assert "rank 1 was last seen at update 7, group 2" in message
    assert seconds < 30  # of a timeout of 60


def stay_behind(rank: int, num_ranks: int) -> str:
    heartbeat = Heartbeat("test")
    heartbeat.enter(3 - rank, f"group {rank}")
    if rank == 1:
        time.sleep(6)
        return ""

    def reduce() -> None:
        with heartbeat.guard("averaging"):
            dist.all_reduce(torch.ones(3))

    return message_of(reduce)


@pytest.mark.slow
def test_a_rank_that_stays_behind_is_named_when_the_timeout_ends() -> None:
    message = run_ranks(stay_behind, 2, collective_timeout_s=3)[0]
    assert "this rank is at update 3, group 0; rank 1 was last seen at update 2, group 1" in message


def test_one_process_agrees_with_itself() -> None:
    assert world_size() == 1
    check_agreement({"seed": 0})
    heartbeat = Heartbeat("alone")
    heartbeat.enter(0, "group 0")
    heartbeat.compare({"updates": 0})
    with pytest.raises(RuntimeError, match=r"^broken$"), heartbeat.guard("averaging"):
        raise RuntimeError("broken")


def test_a_digest_tells_bits_shapes_dtypes_and_names_apart() -> None:
    zeros = torch.zeros(4)
    known = {
        digest({"a": zeros}),
        digest({"b": zeros}),
        digest({"a": torch.zeros(2, 2)}),
        digest({"a": zeros.int()}),
        digest({"a": -zeros}),
    }
    assert len(known) == 5
    assert digest({"a": torch.zeros(4), "b": torch.ones(1)}) == digest({"b": torch.ones(1), "a": torch.zeros(4)})


def fail_on_one(rank: int, num_ranks: int) -> int:
    if rank == 1:
        raise ValueError("only here")
    return rank


def test_the_helper_raises_the_traceback_of_the_rank_that_failed() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*ValueError: only here"):
        run_ranks(fail_on_one, 2)


def hang(rank: int, num_ranks: int) -> None:
    if rank == 0:
        time.sleep(60)


@pytest.mark.slow
def test_the_helper_names_a_rank_that_hangs() -> None:
    with pytest.raises(RankError, match="rank 0 did not return within 8 s"):
        run_ranks(hang, 2, timeout_s=8)
