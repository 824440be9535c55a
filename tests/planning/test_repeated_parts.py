"""Equal parts of a loop, of which a plan runs two, against all of them."""

import threading
from collections.abc import Iterable, Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch

from slivertune.chunked_loss import chunked_cross_entropy, products
from slivertune.core import repeated_work, token_tiles
from slivertune.core.repeated_work import (
    different,
    num_repeats,
    num_stood_for,
    repeating,
    running_different_parts,
    standing_for,
)
from slivertune.hift.chunk import Chunk
from slivertune.planning.fake import without_data
from slivertune.planning.make import make_plan
from slivertune.planning.plan import Plan
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick
from tests.planning.made import narrow_llama

pytestmark = pytest.mark.filterwarnings(r"ignore:the default number of weights \(as many as LoRA of rank 64")

CLASSES = 100_000
"""A chunk of the loss has 167 rows."""
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "autocast": {"method": "dense", "precision": "mixed"},
    "HiFT": {"method": "hift", "layers_per_group": 1},
    "LoRA": {"method": "lora", "gradient_accumulation_steps": 3},
    "SFT": {"method": "sft", "density": 0.1, "estimation_steps": 2, "reselection_interval": 100},
}


ROWS = (160, 167, 334, 500, 1001)


@pytest.mark.parametrize(("way", "rows"), quick(product(WAYS, ROWS), [*zip(WAYS, ROWS, strict=True)]))
def test_a_plan_is_that_of_all_parts(way: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    request = paper_request(**{"precision": "fp32", **WAYS[way], "seq_length": rows, "batch_size": 1})
    config = narrow_llama(2)
    config.vocab_size = CLASSES
    seen = list[int]()

    def planned() -> Plan:
        return make_plan(request, config)

    def watched(parts: Iterable[slice], tensor: torch.Tensor) -> Iterator[slice]:
        for part in different(parts, tensor):
            seen.append(num_repeats())
            yield part

    monkeypatch.setattr(products, "different", watched)
    fast = planned()
    assert (max(seen) > 1) is (rows > 500), "of two equal parts both run"
    monkeypatch.setattr(products, "different", lambda parts, tensor: parts)
    assert planned() == fast


TILED: dict[str, dict[str, Any]] = {
    **WAYS,
    "dense, checkpointed": {"method": "dense", "gradient_checkpointing": True},
    "autocast, checkpointed": {"method": "dense", "precision": "mixed", "gradient_checkpointing": True},
    "HiFT, checkpointed": {
        "method": "hift",
        "layers_per_group": 2,
        "gradient_checkpointing": True,
        "gradients": "host",
    },
    "stepped": {"method": "hift", "layers_per_group": 1, "gradients": "stepped", "gradient_checkpointing": True},
    "LoRA, offloaded": {"method": "lora", "gradient_checkpointing": True, "offload_activations": True},
    "QLoRA": {"method": "lora", "precision": "bf16", "load_in_4bit": True, "gradient_checkpointing": True},
    "SFT, checkpointed": {**WAYS["SFT"], "gradient_checkpointing": True},
    "TokenTune": {"method": "dense", "token_ratio": 0.5, "gradient_checkpointing": True},
    "parked": {"method": "lora", "precision": "bf16", "waiting": "int8", "gradient_checkpointing": True},
}


BATCHES = ((80, 1), (100, 1), (200, 1), (210, 1), (190, 2))


@pytest.mark.parametrize(
    ("way", "rows", "batch_size"),
    quick(
        [(way, *batch) for way, batch in product(TILED, BATCHES)],
        [(way, *batch) for way, batch in zip(TILED, cycle(BATCHES), strict=False)][::2],
    ),
)
def test_a_plan_is_that_of_all_tiles(way: str, rows: int, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"precision": "fp32", **TILED[way], "seq_length": rows, "batch_size": batch_size}
    request = paper_request(**settings, token_tile_size=20 * batch_size)
    config = narrow_llama(2)
    fast = make_plan(request, config)
    monkeypatch.setattr(repeated_work, "_FEWEST_TILES", 10**9)
    assert make_plan(request, config) == fast


def test_few_tiles_run_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int]()

    def watched(self: Any, *tile: torch.Tensor) -> Any:
        lengths.append(tile[0].shape[1])
        return call(self, *tile)

    call = token_tiles._Tiles._call
    monkeypatch.setattr(token_tiles._Tiles, "_call", watched)
    make_plan(paper_request(method="dense", seq_length=2050, batch_size=1, token_tile_size=20), narrow_llama(1))
    modules = 4  # an MLP, two norms of its block, and the last norm
    assert len(lengths) == 2 * 4 * modules and lengths.count(10) == 2 * modules, "forward, and again in the backward"


CHUNKED: dict[str, dict[str, Any]] = {
    "masters": {"precision": "mixed_hi"},
    "two layers, two micro-batches": {"precision": "fp32", "layers_per_group": 2, "gradient_accumulation_steps": 2},
    "gradients on the host": {"precision": "mixed_hi", "gradients": "host", "gradient_accumulation_steps": 2},
    "stepped": {"precision": "bf16", "gradients": "stepped", "master": "stochastic"},
    "discarded": {"precision": "mixed_hi", "state": "discard"},
    "on the device": {"precision": "bf16", "state": "device", "master": "stochastic"},
    "8-bit": {"precision": "mixed_hi", "optimizer": "adamw8bit"},
    "momentum": {"precision": "mixed_hi", "optimizer": "sgd_momentum", "kernels": "cpu"},
    "codes": {"precision": "mixed_hi", "waiting": "int8"},
    "weights on the host": {"precision": "mixed_hi", "weights": "host", "kernels": "gpu"},
    "prefetched": {"precision": "mixed_hi", "prefetch_bytes": 2**20},
}


@pytest.mark.parametrize("way", quick(CHUNKED, ["codes", "masters"]))
def test_a_plan_is_that_of_all_chunks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = paper_request(method="hift", seq_length=16, stream_bytes=2**17, **CHUNKED[way])
    config = narrow_llama(2)
    config.vocab_size = 10_000
    stepped = list[Chunk]()
    step = Chunk.step

    def watched(self: Chunk, *args: Any) -> None:
        stepped.append(self)
        step(self, *args)

    monkeypatch.setattr(Chunk, "step", watched)
    fast, num_fast = make_plan(request, config), len(stepped)
    monkeypatch.setattr(repeated_work, "_FEWEST_EQUAL", 10**9)
    assert make_plan(request, config) == fast
    assert (num_fast < len(stepped) - num_fast) is (way != "on the device")


def test_who_trains_beside_a_plan_counts_for_itself() -> None:
    entered, left = threading.Event(), threading.Event()

    def train() -> None:
        with repeating(1), standing_for(5):
            entered.set()
            left.wait(30)

    thread = threading.Thread(target=train)
    thread.start()
    entered.wait(30)
    with repeating(100):
        left.set()
        thread.join()
        assert (num_repeats(), num_stood_for()) == (100, None)
    assert num_repeats() == 1


def test_who_trains_beside_a_plan_runs_all_parts() -> None:
    hidden, weight = torch.randn(40, 8), torch.randn(100, 8)
    targets = torch.randint(0, 100, (40,))
    alone = chunked_cross_entropy(hidden, weight, targets, chunk_bytes=1200)
    losses = list[torch.Tensor]()

    def train() -> None:
        losses.append(chunked_cross_entropy(hidden, weight, targets, chunk_bytes=1200))

    with without_data():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert torch.equal(losses[0], alone)
    parts = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    assert list(different(parts, hidden)) == parts
    with running_different_parts():
        assert list(different(parts, hidden)) == parts
    with without_data():
        counted = [(part, num_repeats()) for part in different(parts, torch.empty(1))]
    assert counted == [(parts[0], 1), (parts[1], 2), (parts[3], 1)] and num_repeats() == 1
