"""HiFT: hierarchical full-parameter fine-tuning, one group of layers a step (arXiv 2401.15207)."""

from slivertune.hift.config import HiFTConfig
from slivertune.hift.optimizer import HiFT
from slivertune.hift.rotation import Group

__all__ = ["Group", "HiFT", "HiFTConfig"]
