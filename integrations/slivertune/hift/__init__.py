"""HiFT: hierarchical full-parameter fine-tuning, one group of layers a step (arXiv 2401.15207)."""

from .config import HiFTConfig
from .groups import Group
from .optimizer import HiFT

__all__ = ["Group", "HiFT", "HiFTConfig"]
