from __future__ import annotations

from slivertune.parallel.ddp import gradient_sync
from slivertune.planning import stand_ins


def test_the_buckets_that_are_planned_are_those_of_the_all_reduce() -> None:
    # Planning and training may not import each other; this holds their figures together.
    assert stand_ins.ALL_REDUCE_BUCKET_BYTES == gradient_sync.BUCKET_BYTES
    assert stand_ins._MOST_UNDER_WAY == gradient_sync._MOST_UNDER_WAY
