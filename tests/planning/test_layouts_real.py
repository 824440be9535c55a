"""The plan of each layout against real runs of it on two ranks, counted by the ledger from the second cycle on.

What a collective's backend allocates, no operator shows.
"""

from dataclasses import replace
from typing import Any

import pytest

from slivertune.parallel.ddp import gradient_sync
from slivertune.planning.make import make_plan
from slivertune.planning.request import PlanRequest
from tests.helpers.ranks import run_ranks
from tests.planning.layout_runs import BUCKET_BYTES, all_peaks_on_rank
from tests.planning.real import LLAMA

pytestmark = pytest.mark.slow

TOLERANCE = 0.03
"""For small tensors of the engines, and the batch."""
RARELY: dict[str, Any] = {"estimation_steps": 2, "reselection_interval": 100}
"""SFT: two updates in an estimation phase, and many outside."""


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_hift_and_sft_are_as_planned(layout: Any, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sync, "BUCKET_BYTES", BUCKET_BYTES)
    request = PlanRequest(
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
    for peaks, sparse_peaks in run_ranks(all_peaks_on_rank, 2, requests, env={"DS_ACCELERATOR": "cpu"}):
        for group in plan.groups:
            # Of groups alike, the first stands for the others.
            assert group.peak.total == pytest.approx(peaks[group.index], rel=TOLERANCE), (group, peaks)
        assert plan.peak_bytes == pytest.approx(max(peaks), rel=TOLERANCE)
        planned = [each.peak.total for each in sparse.groups]
        assert planned == pytest.approx(sparse_peaks, rel=TOLERANCE), (sparse.groups, sparse_peaks)
