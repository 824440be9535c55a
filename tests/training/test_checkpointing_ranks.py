"""Checkpointed blocks that keep or offload activations, or run in tiles, on two ranks: the bits of plain ones."""

from contextlib import ExitStack
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

CHECKPOINTED = ("--gradient_checkpointing", "true")
KEPT, OFFLOADED = (
    "activations of 1 of 2 checkpointed blocks, from the top",
    "inputs of 2 checkpointed blocks, to host memory",
)
OPTIONS: dict[str, tuple[tuple[str, ...], object, str]] = {
    "kept": (("--keep_activations", "1"), 1, KEPT),
    "offloaded": (("--offload_activations",), True, OFFLOADED),
}
"""What is typed, the setting's value in the results, and what the run says first."""
PAIRS = (("hift", "ddp"), ("hift", "zero2"), ("hift", "zero3"), ("dense", "zero3"), ("dense", "ddp"))
TYPED = {"plain": (), **{name: option[0] for name, option in OPTIONS.items()}, "tiled": ("--token_tile_size", "16")}
CASES = {
    f"{method}-{layout}-{name}": Case(method=method, layout=layout, more=(*CHECKPOINTED, *typed))
    for method, layout in PAIRS
    for name, typed in TYPED.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(tiny_base: Path, texts: Path, folder: Path) -> RanksOf:
    return on_two_ranks(CASES, tiny_base, texts, folder)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("method", "layout"), PAIRS)
def test_ranks_end_with_the_bits_of_plain_checkpointing(
    method: str, layout: str, name: str, ranks: RanksOf, folder: Path
) -> None:
    plain, other = f"{method}-{layout}-plain", f"{method}-{layout}-{name}"
    (option, *_), value, said = OPTIONS[name]
    for without, having in zip(ranks(plain), ranks(other), strict=True):
        assert (without.code, having.code) == (0, 0), having.printed
        assert differing(without.weights, having.weights) == []
    assert_same_bits(folder / plain, folder / other)
    results = results_of(folder / other)
    assert (results["layout"], results["settings"][option.removeprefix("--")]) == (layout, value)
    assert said in ranks(other)[0].printed


@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_ranks_in_tiles_end_with_the_weights_of_whole_batches(layout: str, ranks: RanksOf) -> None:
    for one, other in zip(ranks(f"hift-{layout}-plain"), ranks(f"hift-{layout}-tiled"), strict=True):
        assert other.code == 0, other.printed
        for name, weight in other.weights.items():
            # Sums in another order, in fp32; AdamW's first steps move every weight by the rate, whatever its gradient.
            assert torch.allclose(weight, one.weights[name], rtol=1e-3, atol=1e-4), name


def test_tiles_under_zero_3_are_refused_with_the_way_out(ranks: RanksOf) -> None:
    first, second = ranks("hift-zero3-tiled")
    assert first.code != 0 and second.code != 0
    assert "--token_tile_size does not go with ZeRO-3" in first.printed


SHARDED = [(0.1, name) for name in ("plain", "kept", "offloaded")]
SHARDED += [(0.0, name) for name in ("plain", "tiled", "offloaded and tiled")]
"""Dropout of the attention, and what is attached."""


def train_sharded(rank: int, world: int) -> dict[tuple[float, str], tuple[list[int], dict[str, torch.Tensor]]]:
    """Make two updates under FSDP2 in fp64: recomputations, and this rank's shares of the weights."""
    found = {}
    for dropout, name in SHARDED:
        model: Any = llama(dropout=dropout).double()
        checkpoint(model)
        mesh = init_device_mesh("cpu", (world,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh)
        optimizer, counter = torch.optim.AdamW(model.parameters(), lr=1e-2), CountForwards(model)
        torch.manual_seed(rank)
        with ExitStack() as stack:
            if name == "kept":
                stack.enter_context(st.keep_activations(model, 3))
            if "offloaded" in name:
                stack.enter_context(st.offload_activations(model))
            if "tiled" in name:
                stack.enter_context(st.tile_tokens(model, 6))
            for step in range(2):
                model(**batch(model, world * step + rank)).loss.backward()
                recomputed = counter.recomputed()
                optimizer.step()
                optimizer.zero_grad()
        shares = {key: each.to_local().detach().clone() for key, each in model.named_parameters()}
        found[dropout, name] = recomputed, shares
    return found


def test_blocks_that_fsdp2_shards_keep_and_offload_with_the_same_bits_and_go_in_tiles() -> None:
    for found in run_ranks(train_sharded, 2):
        (all_again, plain), (few_again, kept), (_, offloaded), (_, whole), *tiled = (found[each] for each in SHARDED)
        assert (all_again, few_again) == ([1, 1, 1, 1], [1, 0, 0, 0])
        assert differing(plain, kept) == differing(plain, offloaded) == []
        for _, shares in tiled:
            for name, share in shares.items():
                # AdamW divides by the root of a square, which makes more of the last bits of a small gradient.
                assert torch.allclose(share, whole[name], rtol=1e-6, atol=1e-8), name
