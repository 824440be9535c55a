"""Names of the layouts: the ways in which ranks share a run."""

from typing import Literal

import torch.distributed as dist

Layout = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""Layout of a run. `single` is one process. `zero1` to `zero3` are DeepSpeed's stages."""


def world_size() -> int:
    """Return the number of processes that train together. It is 1 if torch.distributed is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
