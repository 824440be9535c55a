"""A process group of one rank, for torch.distributed.checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def single_rank(folder: Path) -> Iterator[None]:
    """Let this process be the only rank inside."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
