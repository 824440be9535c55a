from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from slivertune.parallel.consistency.timeouts import keeping_timeout, timeout_of
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import CPU, ZERO, quiet, running


def timeouts_of_groups(rank: int, num_ranks: int) -> list[timedelta | None]:
    quiet()
    import deepspeed

    # As of a model that is born in parts: DeepSpeed makes its group before the engine, with torch's own default.
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.utils.groups._clone_world_group()
    found = []
    for layout in ZERO:
        with running(HiFTCase(), layout, rank):
            found += [timeout_of(group) for group in dist.distributed_c10d._world.pg_map]
    return found


@pytest.mark.slow
def test_every_process_group_of_an_engine_has_the_users_timeout() -> None:
    for found in run_ranks(timeouts_of_groups, 2, env=CPU, collective_timeout_s=60):
        assert set(found) == {timedelta(seconds=60)}


def test_groups_that_were_there_before_keep_their_timeout(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    with keeping_timeout():  # on one process without a group there is nothing to keep
        pass
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1, timeout=timedelta(seconds=17)
    )
    try:
        own = dist.new_group([0], timeout=timedelta(seconds=5))
        with keeping_timeout():
            made = dist.new_group([0])
            assert timeout_of(made) != timedelta(seconds=17)
        assert timeout_of(made) == timedelta(seconds=17)
        assert timeout_of(own) == timedelta(seconds=5)
    finally:
        dist.destroy_process_group()
