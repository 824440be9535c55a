from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from slivertune.core.ledger import Census, Ledger, claim
from slivertune.core.sized import sized
from slivertune.planning import make
from slivertune.planning.counter import WorkCounter
from slivertune.planning.fake import without_data
from slivertune.planning.make import make_plan
from slivertune.planning.replayed import Calls, VectorSize, replaying
from tests.helpers.plan_requests import paper_request
from tests.planning.real import LLAMA

SIZE = 1000


def search(values: torch.Tensor) -> torch.Tensor:
    """Takes 12 bytes a value for a moment, of them 8 of residual, and leaves 2."""
    doubled = values * 2
    claimed = torch.empty_like(values)
    claim(claimed, "state")
    return (doubled + values).to(torch.bfloat16)


def census_and_work(function: Any, num_calls: int = 3) -> list[tuple[Census, Any]]:
    """Count each call's bytes at its peak, beside the results of those before, and its operators."""
    found, results = [], []
    with without_data(), replaying({}), Ledger() as ledger:
        values = torch.empty(SIZE)
        for _ in range(num_calls):
            counter = WorkCounter()
            ledger.reset_peak()
            with counter.counting(None):
                results.append(function(values))
            found.append((ledger.peak, counter.work_of(None).operators))
    assert {(each.dtype, each.numel()) for each in results} == {(torch.bfloat16, SIZE)}
    return found


def test_a_replayed_function_takes_what_it_took_and_leaves_as_much() -> None:
    compute = Mock(side_effect=search)
    assert census_and_work(sized(compute)) == census_and_work(search)
    assert compute.call_count == 1


def test_other_sizes_are_another_call_and_outside_all_are_run() -> None:
    compute = Mock(side_effect=lambda *args, **kwargs: torch.empty(3))
    call = sized(compute)

    def num_runs(*args: Any, **kwargs: Any) -> int:
        before = compute.call_count
        call(*args, **kwargs)
        return compute.call_count - before

    with without_data():
        long, short = torch.empty(SIZE), torch.empty(SIZE // 2)
        known: Calls = {}
        with replaying(known):
            assert [num_runs(long, 1), num_runs(long, 1), num_runs(torch.empty(SIZE), 1)] == [1, 0, 0]
            assert [num_runs(short, 1), num_runs(long, 2), num_runs(long.int(), 1)] == [1, 1, 1]
            assert [num_runs(1, [long]), num_runs(1, [long]), num_runs(1, [long, short])] == [1, 0, 1]
            assert [num_runs(long, 1, more=compute), num_runs(long, 1, more=compute)] == [1, 1]
            claim(long, "parameters", "host")
            assert [num_runs(long, 1), num_runs(long, 1)] == [1, 0]
        assert num_runs(long, 1) == 1
        with replaying(known):
            assert [num_runs(long, 1), num_runs(short, 1)] == [0, 0]
        with replaying({}):
            assert num_runs(long, 1) == 1


def test_a_vector_is_made_as_large_as_the_memory_under_it() -> None:
    whole = torch.empty(SIZE, dtype=torch.int32)
    size = VectorSize.of(whole[10:20])
    made = size.make()
    assert (made.numel(), made.dtype, made.untyped_storage().nbytes()) == (10, torch.int32, 4 * SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "gradient_checkpointing": True},
        {"load_in_4bit": True, "gradient_accumulation_steps": 2, "estimation_steps": 3, "reselection_interval": 4},
        {"estimation_steps": 3, "reselection_interval": 5},
        {"gradient_accumulation_steps": 2},
        {"selection": "momentum", "reselection_interval": 2, "load_in_4bit": True},
    ],
    ids=str,
)
def test_a_plan_with_replayed_searches_has_the_bytes_of_one_that_runs_all(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = paper_request(method="sft", precision="bf16", density=0.1, batch_size=2, seq_length=64, **settings)
    replayed = make_plan(request, LLAMA)
    monkeypatch.setattr(make, "replaying", nullcontext)
    assert make_plan(request, LLAMA) == replayed
