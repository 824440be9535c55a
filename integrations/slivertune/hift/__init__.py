"""HiFT: hierarchical full-parameter fine-tuning, one group of layers a step (arXiv 2401.15207)."""

from slivertune.hift.config import HiFTConfig
from slivertune.hift.groups import Group
from slivertune.hift.optimizer import HiFT

__all__ = ["Group", "HiFT", "HiFTConfig"]
