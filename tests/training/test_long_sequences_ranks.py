"""`slivertune train --offload_activations --token_tile_size` on two ranks, and both under FSDP2 by hand."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import slivertune as st
from tests.core.test_kept_activations import batch, blocks_of, checkpoint, llama
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.training.tiny_runs import assert_same_bits, results_of
from tests.training.train_runs import Case, RanksOf, on_two_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

PAIRS = (("hift", "ddp"), ("hift", "zero2"), ("hift", "zero3"), ("dense", "zero3"), ("dense", "ddp"))
CHECKPOINTED = ("--gradient_checkpointing", "true")
OFFLOADED, TILED = ("--offload_activations",), ("--token_tile_size", "16")
CASES = {
    f"{method}-{layout}-{name}": Case(method=method, layout=layout, more=(*CHECKPOINTED, *more))
    for method, layout in PAIRS
    for name, more in (("plain", ()), ("offloaded", OFFLOADED))
} | {
    f"hift-{layout}-tiled": Case(method="hift", layout=layout, more=(*CHECKPOINTED, *TILED))
    for layout in ("ddp", "zero2", "zero3")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(tiny_base: Path, texts: Path, folder: Path) -> RanksOf:
    return on_two_ranks(CASES, tiny_base, texts, folder)


@pytest.mark.parametrize(("method", "layout"), PAIRS)
def test_ranks_that_offload_end_with_the_bits_of_plain_checkpointing(
    method: str, layout: str, ranks: RanksOf, folder: Path
) -> None:
    plain, offloaded = f"{method}-{layout}-plain", f"{method}-{layout}-offloaded"
    for one, other in zip(ranks(plain), ranks(offloaded), strict=True):
        assert (one.code, other.code) == (0, 0), other.printed
        assert differing(one.weights, other.weights) == []
    assert_same_bits(folder / plain, folder / offloaded)
    assert results_of(folder / offloaded)["layout"] == layout
    assert "inputs of 2 checkpointed blocks wait in host memory" in ranks(offloaded)[0].printed


@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_ranks_in_tiles_end_with_the_weights_of_whole_batches(layout: str, ranks: RanksOf) -> None:
    plain, tiled = f"hift-{layout}-plain", f"hift-{layout}-tiled"
    for one, other in zip(ranks(plain), ranks(tiled), strict=True):
        assert other.code == 0, other.printed
        for name, weight in other.weights.items():
            # Sums in another order, in fp32; AdamW's first steps move every weight by the rate, whatever its gradient.
            assert torch.allclose(weight, one.weights[name], rtol=1e-3, atol=1e-4), name


def test_tiles_under_zero_3_are_refused_with_the_way_out(ranks: RanksOf) -> None:
    first, second = ranks("hift-zero3-tiled")
    assert first.code != 0 and second.code != 0
    assert "--token_tile_size does not go with ZeRO-3" in first.printed


def train_sharded(rank: int, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two updates under FSDP2 in fp64: this rank's shares of the weights, by what was attached."""
    found = {}
    for name in ("plain", "offloaded", "tiled", "both"):
        model: Any = llama(dropout=0.0).double()
        checkpoint(model)
        mesh = init_device_mesh("cpu", (world,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with ExitStack() as stack:
            if name in ("offloaded", "both"):
                stack.enter_context(st.offload_activations(model))
            if name in ("tiled", "both"):
                stack.enter_context(st.tile_tokens(model, 6))
            for step in range(2):
                model(**batch(model, world * step + rank)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = {name: each.to_local().detach().clone() for name, each in model.named_parameters()}
    return found


def test_blocks_that_fsdp2_shards_offload_with_the_same_bits_and_go_in_tiles() -> None:
    for found in run_ranks(train_sharded, 2):
        assert differing(found["plain"], found["offloaded"]) == []
        for tiled in ("tiled", "both"):
            for name, share in found[tiled].items():
                # AdamW divides by the root of a square, which makes more of the last bits of a small gradient.
                assert torch.allclose(share, found["plain"][name], rtol=1e-6, atol=1e-8), (tiled, name)
