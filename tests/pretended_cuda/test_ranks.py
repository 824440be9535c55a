"""Two ranks on pretended devices come to what one process does, with collectives as NCCL takes them, without races."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from slivertune.core.layout import Layout
from tests.helpers.ranks import quick, run_ranks
from tests.parallel.contract.runs import running
from tests.parallel.contract.test_equality import CASES, IN_SMALL_BUCKETS, seed_of
from tests.pretended_cuda.on_device import on_device, require_device

RUNS = [
    key
    for key, case in CASES.items()
    if case.clip is None and not key[2].startswith("Llama in bf16") and key != ("hift", "fsdp2", "weights on the host")
]
"""Without norms and SFT's gradients in bf16, which a CPU rounds otherwise, and without a policy that does not pin."""
QUICK: list[tuple[str, Layout, str]] = [
    ("hift", "ddp", "bf16 weights, fp32 masters"),
    ("sft", "ddp", "AG"),
    ("hift", "fsdp2", "bf16 weights, fp32 masters"),
    ("sft", "fsdp2", "AG"),
    ("hift", "zero2", "bf16 under accelerate, DeepSpeed's schedule"),
]


def train(
    rank: int, num_ranks: int, method: str, layout: Layout, name: str, store: Path, is_planted: bool = False
) -> dict[str, Any]:
    """Train a case on this rank's device."""
    from tests.pretended_cuda.collectives import group_of_devices
    from tests.pretended_cuda.detector import Detector
    from tests.pretended_cuda.races import planted

    case = CASES[method, layout, name]
    race = planted() if is_planted else nullcontext()
    with group_of_devices(store, rank, num_ranks), race, Detector() as found:
        with IN_SMALL_BUCKETS, running(case, layout, rank, seed=seed_of(case, layout, rank)) as run:
            run.train(0, case.updates)
            result = {**case.result(run), "weights": case.merged(run)}
        result = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)
    return {
        "result": result,
        "races": dict(found.races),
        "unpinned": dict(found.unpinned),
        "collectives": dict(found.collectives),
        "on autograd's threads": found.num_on_autograd_threads,
    }


def compare(method: str, layout: Layout, name: str, results: list[dict[str, Any]]) -> None:
    """On a device, where HiFT's reference is made, too: attention adds up in another order there than on a CPU."""
    CASES[method, layout, name].assert_equals_one_process(results, layout)


@pytest.mark.parametrize(("method", "layout", "name"), quick(RUNS, QUICK))
def test_ranks_on_devices_equal_one_process_and_nothing_races(
    method: str, layout: Layout, name: str, tmp_path: Path
) -> None:
    require_device()
    found = run_ranks(train, 2, method, layout, name, tmp_path / "store", pretends_cuda=True)
    on_device(compare, method, layout, name, [each["result"] for each in found])
    for each in found:
        assert each["races"] == {} and each["unpinned"] == {}
        assert each["on autograd's threads"] > 100 and sum(each["collectives"].values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("method", "layout", "name"), QUICK)
def test_a_race_that_is_planted_is_reported_on_each_rank(
    method: str, layout: Layout, name: str, tmp_path: Path
) -> None:
    require_device()
    found = run_ranks(train, 2, method, layout, name, tmp_path / "store", True, pretends_cuda=True)
    assert all(each["races"] for each in found)
