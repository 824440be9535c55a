import os
import signal

import pytest

from slivertune.parallel.consistency.headers import NO_GROUP, Header, Stage, find_difference, short_hash
from slivertune.parallel.consistency.heartbeat import Heartbeat
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.runs import message_of


def end_one_of_three(rank: int, num_ranks: int, how: str) -> str:
    heartbeat = Heartbeat("test")
    heartbeat.enter(3, "group 1")
    heartbeat.meet(Header(Stage.FORWARD, 3, 1))
    if rank == 2:
        if how == "dies":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    return message_of(lambda: heartbeat.meet(Header(Stage.GRADIENT_SYNC, 3, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("dies", "rank 2 has ended"), ("stops", "rank 2 is stopped (SIGSTOP")])
def test_of_three_ranks_the_one_that_is_gone_is_named(how: str, said: str) -> None:
    # The limit of a collective is longer than three processes need to start on a busy machine; 90 s end all of it.
    first, second, _ = run_ranks(end_one_of_three, 3, how, may_die=(2,), timeout_s=90, collective_timeout_s=15)
    for message, other in ((first, 1), (second, 0)):
        assert "failed averaging gradients: this rank is at update 3, group 1" in message
        assert f"; {said}" in message and f"rank {other} has ended" not in message


def test_headers_of_many_ranks_show_the_odd_ones() -> None:
    same = [Header(Stage.STEPPING, 5, 1, settings=rank) for rank in range(20)]
    assert find_difference(same) is None
    odd = [*same[:17], Header(Stage.GRADIENT_SYNC, 4, 0, skipped=2, gradients=0), *same[18:]]
    said = find_difference(odd)
    assert said is not None
    assert "rank 0 is stepping the optimizer at update 5, group 1; rank 17 is averaging gradients" in said
    assert "at update 4, group 0, 2 turns skipped, without a gradient; ... (20 ranks)" in said
    assert Header(Stage.SAVING, 1).group == NO_GROUP and "group" not in Header(Stage.SAVING, 1).text()


def test_hashes_of_settings_fit_and_tell_values_apart() -> None:
    assert short_hash({"a": 1, "b": 2}) == short_hash({"b": 2, "a": 1}) < 2**63
    assert len({short_hash(each) for each in ({}, {"a": 1e-3}, {"a": 1e-3 + 1e-18}, {"b": 1e-3})}) == 4
