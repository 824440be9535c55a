"""SFT: sparse fine-tuning with dropping and growth of weights (arXiv 2401.16405)."""

from slivertune.sft.config import SFTConfig
from slivertune.sft.optimizer import SFT

__all__ = ["SFT", "SFTConfig"]
