"""HiFT: hierarchical full-parameter fine-tuning, one group of layers per step (arXiv 2401.15207)."""

from slivertune.hift.config import HiFTConfig
from slivertune.hift.kept_on_host import keep_blocks_on_host
from slivertune.hift.load_quantized import load_quantized
from slivertune.hift.optimizer import HiFT
from slivertune.hift.rotation import Group
from slivertune.hift.waiting_layers import quantize_layers

__all__ = ["Group", "HiFT", "HiFTConfig", "keep_blocks_on_host", "load_quantized", "quantize_layers"]
