"""HiFT: hierarchical full-parameter fine-tuning, one group of layers per step (arXiv 2401.15207)."""

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.hift.config import HiFTConfig
    from slivertune.hift.kept_on_host import keep_blocks_on_host
    from slivertune.hift.load_quantized import load_quantized
    from slivertune.hift.optimizer import HiFT
    from slivertune.hift.rotation import Group
    from slivertune.hift.waiting_layers import quantize_layers

__all__ = ["Group", "HiFT", "HiFTConfig", "keep_blocks_on_host", "load_quantized", "quantize_layers"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Group": "slivertune.hift.rotation",
        "HiFT": "slivertune.hift.optimizer",
        "HiFTConfig": "slivertune.hift.config",
        "keep_blocks_on_host": "slivertune.hift.kept_on_host",
        "load_quantized": "slivertune.hift.load_quantized",
        "quantize_layers": "slivertune.hift.waiting_layers",
    },
)
