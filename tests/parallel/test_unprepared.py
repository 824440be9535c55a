"""A method on ranks that nothing has prepared, and in the hands of an engine or of a checkpoint that is not whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slivertune import HiFT
from tests.helpers.models import tiny_llama, token_batches, weights
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import Case, message_of
from tests.parallel.contract.sft import SFTCase
from tests.parallel.reference import ADAMW, on_ranks

METHODS: dict[str, Case] = {"HiFT": HiFTCase(), "SFT": SFTCase(model="llama", density=0.1)}
WAYS: dict[str, Callable[[Any, nn.Module, Any], tuple[nn.Module, Any]]] = {
    "alone": lambda accelerator, model, optimizer: (model, optimizer),
    "plain": lambda accelerator, model, optimizer: (nn.parallel.DistributedDataParallel(model), optimizer),
    "accelerator.prepare": lambda accelerator, model, optimizer: accelerator.prepare(model, optimizer),
}


UNPREPARED = {"HiFT": "HiFT runs on 2 ranks", "SFT": "2 ranks train with SFT, and nothing averages their gradients"}


def step_unprepared(rank: int, num_ranks: int) -> dict[tuple[str, str], str]:
    messages = {}
    for method, case in METHODS.items():
        for way, wrap in WAYS.items():
            model = case.build_model()
            built = case.build_optimizer(model)
            with on_ranks() as accelerator:
                wrapped, optimizer = wrap(accelerator, model, built)

                def step(case: Case = case, wrapped: nn.Module = wrapped, optimizer: Any = optimizer) -> None:
                    case.loss(wrapped, case.batch(0, 0, rank)).backward()
                    optimizer.step()

                messages[method, way] = message_of(step)
            assert built.updates == 0
    return messages


@pytest.fixture(scope="module")
def messages() -> list[dict[tuple[str, str], str]]:
    return run_ranks(step_unprepared, 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_ranks_that_were_not_prepared_names_what_to_call(
    method: str, way: str, messages: list[dict[tuple[str, str], str]]
) -> None:
    for each in messages:
        assert each[method, way].startswith(f"RuntimeError: {UNPREPARED[method]}")
        for way_out in ("slivertune.prepare", "slivertune.initialize", "slivertune.attach"):
            assert way_out in each[method, way]


def test_one_process_needs_no_preparation() -> None:
    assert not dist.is_initialized()
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    model(**token_batches(1)[0]).loss.backward()
    hift.step()
    assert hift.updates == 1 and not hift.uses_sidecar


def test_what_an_engine_steps_refuses_to_step_by_itself() -> None:
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    hift.delegate_to("DeepSpeed's ZeRO-2")
    assert all(parameter.requires_grad for parameter in model.parameters())
    for call in (hift.step, hift.state_dict, lambda: hift.load_state_dict({"hift": {}})):
        with pytest.raises(RuntimeError, match="DeepSpeed's ZeRO-2 steps in HiFT's place"):
            call()
    before = weights(model)
    model(**token_batches(1)[0]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "hooks were left behind"
    assert weights(model).keys() == before.keys()


def test_a_placeholder_alone_does_not_resume_a_run() -> None:
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    hift.use_sidecar("DDP")
    for batch in token_batches(3):
        model(**batch).loss.backward()
        hift.step()
    saved, whole = hift.state_dict(), hift.whole_state()
    assert hift._updates_in_placeholder(saved) == 3 and hift._updates_in_placeholder(whole) is None

    again = tiny_llama()
    resumed = HiFT(again, torch.optim.AdamW, **{**ADAMW, "lr": 5.0})
    resumed.use_sidecar("DDP")
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == ADAMW["lr"]
    again(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"made after 3 updates, but HiFT's own state, .*, is of 0; load the whole"):
        resumed.step()
    assert resumed.updates == 0
    resumed.load_whole_state(whole)
    again(**token_batches(1)[0]).loss.backward()
    resumed.step()
    assert resumed.updates == 4


def test_a_state_that_is_no_placeholder_is_not_taken_for_one() -> None:
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    assert hift._updates_in_placeholder({"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": []}) is None
    hift.use_sidecar("DDP")
    for batch in token_batches(4):
        model(**batch).loss.backward()
        hift.step()
    placeholder = hift.state_dict()
    assert hift._updates_in_placeholder(placeholder) == 4
    hift.load_state_dict(placeholder)
    for batch in token_batches(2):  # only the first step after a load is held against it
        model(**batch).loss.backward()
        hift.step()
    assert hift.updates == 6
