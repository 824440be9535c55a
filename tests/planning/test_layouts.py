"""Plans of layouts by their sizes, and against real runs on two ranks, counted by the ledger from the second cycle."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig

from slivertune.core.layout import Layout
from slivertune.hift.config import ALL_LAYERS
from slivertune.parallel.ddp import gradient_sync
from slivertune.planning import layouts
from slivertune.planning.layouts import LayerSizes, sizes_of
from slivertune.planning.make import make_plan
from slivertune.planning.model import build_model
from slivertune.planning.plan import Plan
from tests.helpers.pairwise import rotated
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick, run_ranks
from tests.planning.layout_runs import BUCKET_BYTES, all_peaks_on_rank, host_bytes_on_rank
from tests.planning.real import LLAMA

SMALL = LlamaConfig(**{**LLAMA.to_diff_dict(), "num_hidden_layers": 2})
"""A block at work and one on its way."""
ALONE = paper_request(precision="mixed_hi", gradient_checkpointing=True, batch_size=2, seq_length=64)


@cache
def plan(layout: Layout, num_gpus: int, **settings: Any) -> Plan:
    return make_plan(replace(ALONE, layout=layout, num_gpus=num_gpus, **settings), SMALL)


@pytest.fixture(scope="module")
def sizes() -> LayerSizes:
    return sizes_of(build_model(ALONE, SMALL))


@pytest.fixture(scope="module")
def alone() -> Plan:
    return make_plan(ALONE, SMALL)


def test_layers_are_measured_as_they_are_stored(sizes: LayerSizes) -> None:
    block = 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128)
    table = 2 * 512 * 128
    assert (sizes.largest_block, sizes.largest) == (block, block)
    assert sizes.outside_blocks == 2 * table + 2 * 128
    assert (sizes.bucket_elements, sizes.itemsize) == (128**2, 2)


def test_ddp_adds_no_more_than_buckets_of_the_active_groups_gradients(alone: Plan) -> None:
    shared = plan("ddp", 2)
    for group, before in zip(shared.groups, alone.groups, strict=True):
        assert before.peak.total <= group.peak.total <= before.peak.total + 1.01 * before.gradient_bytes
    assert shared.host_bytes == alone.host_bytes


def test_dense_ddp_keeps_buckets_as_large_as_all_gradients() -> None:
    request = replace(ALONE, method="dense", precision="fp32")
    before = make_plan(request, SMALL)
    shared = make_plan(replace(request, layout="ddp", num_gpus=4), SMALL)
    assert shared.peak_bytes == before.peak_bytes + before.gradient_bytes


@rotated(layout=["zero1", "zero2"], ranks=[2, 4])
def test_zero_keeps_weights_and_shares_the_groups_state_out(
    layout: Any, ranks: int, alone: Plan, sizes: LayerSizes
) -> None:
    shared = plan(layout, ranks)
    for group, before in zip(shared.groups, alone.groups, strict=True):
        assert group.peak.parameters == before.peak.parameters
        # AdamW's moments and the master, 12 bytes per parameter, and a step count per tensor.
        assert group.peak.state == pytest.approx(12 * group.num_parameters / ranks, rel=1e-3)
        assert group.peak.gradients <= before.gradient_bytes + sizes.bucket_elements * sizes.itemsize
    assert shared.host_bytes == pytest.approx(12 * alone.num_parameters / ranks, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 8])
def test_zero3_shares_the_weights_out_and_gathers_layers(ranks: int, alone: Plan) -> None:
    peak = plan("zero3", ranks).peak
    weights = alone.peak.parameters
    # So small a model stays gathered whole.
    assert peak.parameters == pytest.approx(weights / ranks + weights, abs=1)


def test_zero3_lets_weights_go_beyond_those_that_it_leaves_gathered(
    sizes: LayerSizes, alone: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_MOST_LIVE_ELEMENTS", 0)
    gathered = sizes.largest + sizes.largest_block
    found = make_plan(replace(ALONE, layout="zero3", num_gpus=2), SMALL)
    assert found.peak.parameters == pytest.approx(alone.peak.parameters / 2 + gathered, abs=1)


def test_fsdp2_streams_a_ranks_part_of_the_state(sizes: LayerSizes, alone: Plan) -> None:
    shared = plan("fsdp2", 4)
    # A block at work, and the next one on its way, which is a block as well.
    own = sizes.shared / 4 + sizes.stored - sizes.shared
    assert shared.peak.parameters == pytest.approx(own + 2 * sizes.largest_block, abs=1)
    assert shared.peak.state <= 2 * ALONE.stream_bytes
    assert shared.host_bytes == pytest.approx(alone.host_bytes / 4, abs=1)


@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_parameters_on_the_host_leave_the_device_but_for_the_layers_at_work(layout: Any, sizes: LayerSizes) -> None:
    request = replace(ALONE, layout=layout, num_gpus=2)
    # With four blocks half of all weights is more than the layers at work.
    kept, moved = (make_plan(replace(request, offload_parameters=offloads), LLAMA) for offloads in (False, True))
    gathered = 3 * sizes.largest_block if layout == "fsdp2" else kept.parameter_bytes
    assert moved.peak.parameters <= gathered + sizes.stored - sizes.shared
    assert kept.peak.parameters - moved.peak.parameters == pytest.approx(kept.parameter_bytes / 2, rel=0.3)
    assert moved.host_bytes > kept.host_bytes


def test_a_plan_says_what_was_computed_from_sizes() -> None:
    assert any("'zero3'" in note and "from sizes" in note for note in plan("zero3", 2).notes)


TOLERANCE = 0.03
"""For small tensors of the engines, and the batch."""
RARELY: dict[str, Any] = {"estimation_steps": 2, "reselection_interval": 100}
"""SFT: two updates in an estimation phase, and many outside."""


ON_HOST: dict[Any, list[dict[str, Any]]] = {
    "ddp": [
        {"optimizer": "adafactor"},
        {"gradients": "host", "layers_per_group": 3},
        {"state": "discard", "steps_per_group": 2},
    ],
    "fsdp2": [{}, {"precision": "bf16"}, {"state": "discard", "steps_per_group": 2}, {"state": "device"}],
    "zero1": [{}, {"optimizer": "sgd_momentum"}, {"precision": "fp32"}],
    "zero2": [{}, {"state": "device"}],
    "zero3": [{}, {"optimizer": "sgd_momentum"}],
}
"""Runs of HiFT by layout."""


@pytest.mark.parametrize("layout", quick(ON_HOST, ["ddp", "fsdp2"]))
def test_host_memory_of_a_rank_is_as_planned(layout: Any) -> None:
    of_layout: dict[str, Any] = {"layout": layout, "num_gpus": 2, "batch_size": 1, "seq_length": 16}
    requests = [paper_request(**{"precision": "mixed_hi", **of_layout, **settings}) for settings in ON_HOST[layout]]
    planned = [make_plan(each, SMALL).host_bytes for each in requests]
    for found in run_ranks(host_bytes_on_rank, 2, requests, SMALL):
        assert planned == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"layers_per_group": 2}, {"inactive": "above"}, ALL_LAYERS], ids=str)
def test_steps_in_the_backward_under_ddp_are_as_planned(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", BUCKET_BYTES)
    own = {"gradients": "stepped", "master": "stochastic", **settings}
    shape: dict[str, Any] = {"batch_size": 2, "seq_length": 64, "stream_bytes": 2**18, "layout": "ddp", "num_gpus": 2}
    request = paper_request(precision="bf16", gradient_checkpointing=True, **own, **shape)
    plan = make_plan(request, LLAMA)
    for (peaks,) in run_ranks(all_peaks_on_rank, 2, [request]):
        assert plan.peak_bytes == pytest.approx(max(peaks), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_hift_and_sft_are_as_planned(layout: Any, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a collective's backend allocates, no operator shows.
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", BUCKET_BYTES)
    request = paper_request(
        precision="mixed_hi",
        gradient_checkpointing=checkpointing,
        chunked_cross_entropy=layout not in ("fsdp2", "zero3"),
        batch_size=2,
        seq_length=64,
        stream_bytes=2**18,
        layout=layout,
        num_gpus=2,
    )
    requests = [request, replace(request, method="sft", precision="bf16", density=0.2, **RARELY)]
    plan, sparse = (make_plan(each, LLAMA) for each in requests)
    for peaks, sparse_peaks in run_ranks(all_peaks_on_rank, 2, requests):
        for group in plan.groups:
            # Of groups alike, the first stands for the others.
            assert group.peak.total == pytest.approx(peaks[group.index], rel=TOLERANCE), (group, peaks)
        assert plan.peak_bytes == pytest.approx(max(peaks), rel=TOLERANCE)
        assert [each.peak.total for each in sparse.groups] == pytest.approx(sparse_peaks, rel=TOLERANCE), (
            sparse.groups,
            sparse_peaks,
        )
