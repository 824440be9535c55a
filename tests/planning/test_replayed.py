from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from slivertune.core.ledger import Census, Ledger, claim
from slivertune.planning import sft_run
from slivertune.planning.fake import without_data
from slivertune.planning.make import make_plan
from slivertune.planning.replayed import VectorSize, replay, replaying
from tests.helpers.plan_requests import paper_request
from tests.planning.real import LLAMA

SIZE = 1000


def search(values: torch.Tensor) -> torch.Tensor:
    """Takes 12 bytes a value for a moment, of them 8 of residual, and leaves 2."""
    doubled = values * 2
    claimed = torch.empty_like(values)
    claim(claimed, "state")
    return (doubled + values).to(torch.bfloat16)


def peaks(function: Any, num_calls: int = 3) -> list[Census]:
    """What each call takes at its peak, beside the results of those before."""
    found, results = [], []
    with without_data(), replaying(), Ledger() as ledger:
        values = torch.empty(SIZE)
        for _ in range(num_calls):
            ledger.reset_peak()
            results.append(function(values))
            found.append(ledger.peak)
    assert {(each.dtype, each.numel()) for each in results} == {(torch.bfloat16, SIZE)}
    return found


def test_a_replayed_computation_takes_what_it_took_and_leaves_as_much() -> None:
    compute = Mock(side_effect=search)

    def replayed(values: torch.Tensor) -> torch.Tensor:
        return replay("key", lambda: [values], lambda: compute(values), VectorSize.of, VectorSize.make)

    assert peaks(replayed) == peaks(search)
    assert compute.call_count == 1


def test_another_key_is_another_computation_and_outside_all_are_run() -> None:
    compute = Mock(side_effect=lambda: None)

    def run(key: int) -> None:
        replay(key, list, compute, lambda _: None, lambda _: None)

    with without_data():
        with replaying():
            for key in (1, 2, 1, 2):
                run(key)
        assert compute.call_count == 2
        run(1)
        with replaying():
            run(1)
    assert compute.call_count == 4


def test_a_computation_that_frees_what_was_there_is_run_each_time() -> None:
    compute = Mock()
    with without_data(), replaying():
        for _ in range(2):
            there = [torch.empty(SIZE)]
            claim(there[0], "state")

            def free(there: list[torch.Tensor] = there) -> torch.Tensor:
                compute()
                there.clear()
                return torch.empty(2 * SIZE)

            replay("key", there.copy, free, VectorSize.of, VectorSize.make)
    assert compute.call_count == 2


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
    monkeypatch.setattr(sft_run, "replaying", nullcontext)
    assert make_plan(request, LLAMA) == replayed
