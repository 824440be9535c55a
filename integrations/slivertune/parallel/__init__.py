"""HiFT, SFT and TokenTune on several ranks. DDP, FSDP2 and ZeRO-1, 2 and 3 have one folder each."""

from slivertune.parallel.initialize import initialize
from slivertune.parallel.prepare import prepare

__all__ = ["initialize", "prepare"]
