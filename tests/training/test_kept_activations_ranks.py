"""`slivertune train --keep_activations` on two ranks: the bits of plain checkpointing under each layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import slivertune as st
from tests.core.test_kept_activations import CountForwards, batch, blocks_of, checkpoint, llama
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.training.tiny_runs import assert_same_bits, results_of
from tests.training.train_runs import Case, RanksOf, on_two_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

PAIRS = (("hift", "ddp"), ("hift", "zero2"), ("hift", "zero3"), ("dense", "zero3"))
CASES = {
    f"{method}-{layout}-{number}": Case(
        method=method, layout=layout, more=("--gradient_checkpointing", "true", "--keep_activations", str(number))
    )
    for method, layout in PAIRS
    for number in (0, 1)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(tiny_base: Path, texts: Path, folder: Path) -> RanksOf:
    return on_two_ranks(CASES, tiny_base, texts, folder)


@pytest.mark.parametrize(("method", "layout"), PAIRS)
def test_ranks_that_keep_activations_end_with_the_bits_of_plain_checkpointing(
    method: str, layout: str, ranks: RanksOf, folder: Path
) -> None:
    none, one = f"{method}-{layout}-0", f"{method}-{layout}-1"
    for without, keeping in zip(ranks(none), ranks(one), strict=True):
        assert (without.code, keeping.code) == (0, 0), keeping.printed
        assert differing(without.weights, keeping.weights) == []
    assert_same_bits(folder / none, folder / one)
    assert results_of(folder / one)["layout"] == layout
    assert results_of(folder / one)["settings"]["keep_activations"] == 1
    assert "activations of the uppermost of 2 checkpointed blocks: 1" in ranks(one)[0].printed


def train_sharded(rank: int, world: int) -> dict[int, tuple[list[int], dict[str, torch.Tensor]]]:
    """Two updates under FSDP2, by how many blocks keep: recomputations, and this rank's shares of the weights."""
    found = {}
    for number in (0, 3):
        model: Any = llama()
        checkpoint(model)
        mesh = init_device_mesh("cpu", (world,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh)
        optimizer, counter = torch.optim.AdamW(model.parameters(), lr=1e-2), CountForwards(model)
        torch.manual_seed(rank)
        with st.keep_activations(model, number):
            for step in range(2):
                model(**batch(model, world * step + rank)).loss.backward()
                recomputed = counter.recomputed()
                optimizer.step()
                optimizer.zero_grad()
        shares = {name: each.to_local().detach().clone() for name, each in model.named_parameters()}
        found[number] = recomputed, shares
    return found


def test_blocks_that_fsdp2_shards_keep_activations_with_the_same_bits() -> None:
    for found in run_ranks(train_sharded, 2):
        (all_again, plain), (few_again, kept) = found[0], found[3]
        assert (all_again, few_again) == ([1, 1, 1, 1], [1, 0, 0, 0])
        assert differing(plain, kept) == []
