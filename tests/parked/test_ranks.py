"""Parked layers on several ranks: the bits of ranks whose weights are dense, made by hand."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slivertune
from slivertune import park_layers
from tests.helpers.models import bits, tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.reference import batch_of
from tests.parked.test_park import FACTORS, by_hand, optimizer_of, with_lora


def updates(model: nn.Module, optimizer: Any, rank: int) -> list[Any]:
    seen: list[Any] = []
    for update in range(4):
        loss = model(**batch_of(update, 0, rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen + [each.detach().clone() for each in model.parameters() if each.requires_grad]


def under_ddp(rank: int, num_ranks: int, form: Any, place: Any) -> list[Any]:
    model = with_lora(tiny_llama(torch.bfloat16, blocks=4))
    dense = by_hand(model, form)
    park_layers(model, form=form, place=place)
    runs = []
    for each in (model, dense):
        wrapped = DistributedDataParallel(each)
        runs.append(updates(wrapped, optimizer_of(wrapped, "lora"), rank))
    return runs


def prepared(rank: int, num_ranks: int, way: str, form: Any, place: Any) -> list[Any]:
    """Rank 1 has other weights before, and those of rank 0 from then on."""
    runs = []
    for is_parked in (True, False):
        model = tiny_llama(torch.bfloat16, blocks=4, seed=rank if is_parked else 0)
        model = model if way == "sft" else with_lora(model)
        model = model if is_parked else by_hand(model, form, all_of_them=way == "sft")
        optimizer = optimizer_of(model, way)
        if is_parked:
            park_layers(model, form=form, place=place)
        placed, optimizer = slivertune.prepare(Accelerator(cpu=True), model, optimizer)
        runs.append(updates(placed, optimizer, rank))
    return runs


def check(results: list[Any]) -> None:
    for own, plain in results:
        assert len(own) == len(plain) and len(own) > 4
        for one, other in zip(own, plain, strict=True):
            assert torch.equal(bits(one), bits(other)) if isinstance(one, torch.Tensor) else one == other
    assert results[0][0][:4] != results[1][0][:4], "each rank has rows of its own"


@pytest.mark.parametrize("storage", FACTORS["storage"], ids=str)
def test_torchs_ddp_trains_adapters_over_parked_layers(storage: Any) -> None:
    check(run_ranks(under_ddp, 2, *storage))


@pytest.mark.filterwarnings("ignore:.*HiFT keeps them frozen:UserWarning")
@pytest.mark.parametrize("storage", [("int8", "device"), ("exact", "host")], ids=str)
@pytest.mark.parametrize("way", ["hift x lora", "sft"])
def test_prepared_ranks_share_the_parked_weights_of_the_first(way: str, storage: Any) -> None:
    check(run_ranks(prepared, 2, way, *storage))
