"""SFT: sparse fine-tuning with dropping and growth of weights (arXiv 2401.16405)."""

from slivertune.sft.applied import AppliedDeltas, apply
from slivertune.sft.config import SFTConfig
from slivertune.sft.delta import SparseDelta
from slivertune.sft.delta_file import DeltaFile, load, save_pretrained
from slivertune.sft.optimizer import SFT

__all__ = ["SFT", "AppliedDeltas", "DeltaFile", "SFTConfig", "SparseDelta", "apply", "load", "save_pretrained"]
