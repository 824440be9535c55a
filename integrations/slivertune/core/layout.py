"""Names of the layouts: the ways in which ranks share a run."""

from typing import Literal

Layout = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""Layout of a run. `single` is one process. `zero1` to `zero3` are DeepSpeed's stages."""
