"""Parked weights: those that do not train now, as codes, on the host, or both."""

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.parked.kept_on_host import keep_blocks_on_host
    from slivertune.parked.load_quantized import load_quantized
    from slivertune.parked.park import ParkedLayers, park_layers
    from slivertune.parked.quantized_layers import quantize_layers

__all__ = ["ParkedLayers", "keep_blocks_on_host", "load_quantized", "park_layers", "quantize_layers"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ParkedLayers": "slivertune.parked.park",
        "keep_blocks_on_host": "slivertune.parked.kept_on_host",
        "load_quantized": "slivertune.parked.load_quantized",
        "park_layers": "slivertune.parked.park",
        "quantize_layers": "slivertune.parked.quantized_layers",
    },
)
