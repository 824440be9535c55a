"""The plan of each layout against real runs of it on two ranks, counted by the ledger from the second cycle on.

FSDP2 is not among these. What a collective's backend allocates, no operator shows.
"""

from __future__ import annotations

from typing import Any

import pytest

from slivertune.planning import stand_ins
from slivertune.planning.make import make_plan
from slivertune.planning.request import PlanRequest
from tests.helpers.ranks import run_ranks
from tests.planning.layout_runs import BUCKET_BYTES, peaks_on_rank
from tests.planning.real import LLAMA

TOLERANCE = 0.03
"""For small tensors of the engines, and the batch."""


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_hift_on_ranks_is_as_planned(layout: Any, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "EXCHANGE_BUCKET_BYTES", BUCKET_BYTES)
    request = PlanRequest(
        precision="mixed_hi",
        gradient_checkpointing=checkpointing,
        chunked_cross_entropy=layout != "zero3",
        batch_size=2,
        seq_length=64,
        stream_bytes=2**18,
        layout=layout,
        num_gpus=2,
    )
    plan = make_plan(request, LLAMA)
    ranks = run_ranks(peaks_on_rank, 2, request, env={"DS_ACCELERATOR": "cpu"})
    for peaks in ranks:
        for group in plan.groups:
            # Of groups alike, the first stands for the others.
            assert group.peak.total == pytest.approx(peaks[group.index], rel=TOLERANCE), (group, peaks)
        assert plan.peak_bytes == pytest.approx(max(peaks), rel=TOLERANCE)
