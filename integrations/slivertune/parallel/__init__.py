"""HiFT, SFT and TokenTune across ranks: DDP, FSDP2 and ZeRO-1, 2 and 3, a folder for each."""

from slivertune.parallel.initialize import initialize
from slivertune.parallel.prepare import prepare

__all__ = ["initialize", "prepare"]
