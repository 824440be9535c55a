import os
import time

import pytest
import torch
import torch.distributed as dist

from slivertune.core.layout import world_size
from slivertune.parallel.consistency.heartbeat import Heartbeat, check_agreement, digest
from tests.helpers.ranks import run_ranks
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


def test_what_differs_is_named_with_the_value_of_every_rank_and_where_they_are() -> None:
    for each in run_ranks(agree_and_drift, 3):
        assert each["settings"].startswith("ValueError: the ranks disagree on seed: 0 on rank 0, 1 on rank 1, 2 on")
        assert "the ranks disagree on extra: 1 on rank 0, None on rank 1" in each["missing"]
        assert each["drift"].startswith("RuntimeError: the ranks have drifted apart, at update 5, group 1: updates is")
        assert "6 on rank 2" in each["drift"]


def leave_alone(rank: int, num_ranks: int, dies: bool) -> tuple[str, float]:
    """Rank 1 dies, or stays behind for longer than a collective waits."""
    heartbeat = Heartbeat("test")
    heartbeat.enter(7 - rank, f"group {rank}")
    if rank == 1:
        time.sleep(1 if dies else 6)
        if dies:
            os._exit(1)
        return "", 0.0
    heartbeat.enter(8, "group 0")
    begin = time.monotonic()

    def reduce() -> None:
        with heartbeat.guard("averaging the gradients of group 0"):
            dist.all_reduce(torch.ones(3))

    return message_of(reduce), time.monotonic() - begin


@pytest.mark.parametrize(
    ("dies", "timeout_s"), [(True, 60), pytest.param(False, 3, marks=pytest.mark.slow)], ids=["dies", "stays behind"]
)
def test_a_rank_that_is_missing_is_named_and_where_it_was_last_seen(dies: bool, timeout_s: float) -> None:
    message, seconds = run_ranks(leave_alone, 2, dies, may_die=(1,), collective_timeout_s=timeout_s)[0]
    assert "rank 0 failed averaging the gradients of group 0" in message
    assert "this rank is at update 8, group 0; " in message
    assert "rank 1 was last seen at update 6, group 1" in message
    assert seconds < 30  # where it died, of a timeout of 60


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
    different = ({"a": zeros}, {"b": zeros}, {"a": torch.zeros(2, 2)}, {"a": zeros.int()}, {"a": -zeros})
    assert len(set(map(digest, different))) == 5
    assert digest({"a": torch.zeros(4), "b": torch.ones(1)}) == digest({"b": torch.ones(1), "a": torch.zeros(4)})
