"""Parked weights: those that do not train now, as codes, on the host, or both."""

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.parked.load_quantized import load_quantized
    from slivertune.parked.park import ParkedLayers, park_layers

__all__ = ["ParkedLayers", "load_quantized", "park_layers"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ParkedLayers": "slivertune.parked.park",
        "load_quantized": "slivertune.parked.load_quantized",
        "park_layers": "slivertune.parked.park",
    },
)
