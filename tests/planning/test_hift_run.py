from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from slivertune.core.layers import find_layers
from slivertune.hift.groups import cut_groups
from slivertune.planning.fake import without_data
from slivertune.planning.hift_run import HiFTRun, alike
from slivertune.planning.make import attached, build_model, give_sizes, make_batch, make_plan
from slivertune.planning.request import PlanRequest
from tests.planning.real import LLAMA

SIZES: dict[str, Any] = {"batch_size": 2, "seq_length": 64}


def every_peak(request: PlanRequest) -> dict[int, int]:
    """The peak of every group, run one by one; in what each leaves out only the state of others is missing."""
    model = build_model(request, LLAMA)
    with without_data():
        give_sizes(model)
        with attached(request, model):
            batch = make_batch(request)
            run = HiFTRun(model, request)
            return {
                group.index: run.measure(group, lambda: model(**batch).loss).census.device
                for group in run.optimizer.groups
            }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "mixed_hi"},
        {"precision": "mixed_hi", "gradient_checkpointing": True},
        {"precision": "fp32", "stream_bytes": 0, "optimizer": "adagrad"},
        {"precision": "bf16", "chunked_cross_entropy": False, "gradient_checkpointing": True},
        {"precision": "mixed_hi", "token_ratio": 0.3},
    ],
)
def test_of_groups_alike_the_lowest_has_the_largest_peak(settings: dict[str, Any]) -> None:
    request = PlanRequest(**settings, **SIZES)
    peaks = every_peak(request)
    plan = make_plan(request, LLAMA)
    assert sorted(index for group in plan.groups for index in group.indices) == sorted(peaks)
    assert len(plan.groups) < len(peaks)
    for group in plan.groups:
        assert group.peak.total == max(peaks[index] for index in group.indices)
    assert plan.peak_bytes == max(peaks.values())


def test_groups_are_alike_by_kind_shape_and_dtype() -> None:
    model = build_model(PlanRequest(), LLAMA)
    groups = cut_groups(find_layers(model), 1, frozenset(name for name, _ in model.named_parameters()))
    assert [[group.index for group in found] for found in alike(groups, model)] == [[0], [1, 2, 3, 4], [5]]


def test_the_state_of_all_groups_stays_on_the_device_if_it_is_asked_to() -> None:
    plan = make_plan(PlanRequest(precision="mixed_hi", state="device", **SIZES), LLAMA)
    assert plan.host_bytes == 0
    # AdamW's two moments and the master, 12 bytes a parameter; and a step count a tensor.
    assert plan.peak.state >= 12 * plan.num_parameters


def test_what_waits_in_files_is_as_much_as_would_wait_on_the_host() -> None:
    on_host = make_plan(PlanRequest(precision="mixed_hi", **SIZES), LLAMA)
    on_disk = make_plan(PlanRequest(precision="mixed_hi", state="disk", **SIZES), LLAMA)
    assert (on_disk.disk_bytes, on_disk.host_bytes) == (on_host.host_bytes, 0)
    assert on_host.host_bytes >= 12 * on_host.num_parameters
    assert on_disk.peak == on_host.peak


@pytest.mark.slow
def test_pieces_bound_what_state_takes_on_the_device() -> None:
    config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    whole = make_plan(PlanRequest(precision="mixed_hi", stream_bytes=0), config)
    pieces = make_plan(PlanRequest(precision="mixed_hi", stream_bytes=2**20), config)
    assert max(group.peak.state for group in pieces.groups) <= 2 * 2**20
    assert max(group.peak.state for group in whole.groups) > 8 * 2**20
    assert (whole.state_bytes, whole.gradient_bytes) == (pieces.state_bytes, pieces.gradient_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("stream_bytes", [2**20, 2**20 + 1])
def test_both_pieces_of_steps_in_the_backward_together_take_what_one_takes_otherwise(stream_bytes: int) -> None:
    config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    request = PlanRequest(precision="mixed_hi", stream_bytes=stream_bytes, seq_length=8)
    after = max(group.peak.state for group in make_plan(request, config).groups)
    within = max(group.peak.state for group in make_plan(replace(request, step_in_backward=True), config).groups)
    assert stream_bytes < after <= 2 * stream_bytes
    assert stream_bytes / 2 < within <= stream_bytes
