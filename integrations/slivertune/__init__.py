"""Fine-tune a sliver of the model at a time.

HiFT trains a sliver of the layers, SFT of the weights, TokenTune of the tokens. HiFT and SFT updates equal dense
updates of the weights they train. TokenTune approximates the gradient. Memory and time shrink with the sliver.

The public names are resolved on first use (PEP 562), so `import slivertune` imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slivertune.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from slivertune.chunked_loss import (
        ChunkedCrossEntropyHandle,
        attach_chunked_cross_entropy,
        chunked_cross_entropy,
        why_not_chunked,
    )
    from slivertune.core.compiled_blocks import CompiledBlocks, compile_blocks
    from slivertune.core.kept_activations import keep_activations
    from slivertune.core.layers import Layer, find_layers
    from slivertune.core.ledger import Census, Ledger
    from slivertune.core.offloaded_activations import offload_activations
    from slivertune.core.token_tiles import tile_tokens
    from slivertune.deltas import SparseDelta
    from slivertune.hift import HiFT, HiFTConfig, park_for_hift
    from slivertune.interop import attach
    from slivertune.parallel.initialize import initialize
    from slivertune.parallel.prepare import prepare
    from slivertune.parked import ParkedLayers, load_quantized, park_layers
    from slivertune.sft import SFT, SFTConfig
    from slivertune.tokentune import TokenTune, TokenTuneHandle

__version__ = "0.1.0"

__all__ = [
    "SFT",
    "Census",
    "ChunkedCrossEntropyHandle",
    "CompiledBlocks",
    "HiFT",
    "HiFTConfig",
    "Layer",
    "Ledger",
    "ParkedLayers",
    "SFTConfig",
    "SparseDelta",
    "TokenTune",
    "TokenTuneHandle",
    "__version__",
    "attach",
    "attach_chunked_cross_entropy",
    "chunked_cross_entropy",
    "compile_blocks",
    "find_layers",
    "initialize",
    "keep_activations",
    "load_quantized",
    "offload_activations",
    "park_for_hift",
    "park_layers",
    "prepare",
    "tile_tokens",
    "why_not_chunked",
]

_MODULE_OF_NAME = {
    "Census": "slivertune.core.ledger",
    "ChunkedCrossEntropyHandle": "slivertune.chunked_loss",
    "CompiledBlocks": "slivertune.core.compiled_blocks",
    "HiFT": "slivertune.hift",
    "HiFTConfig": "slivertune.hift",
    "Layer": "slivertune.core.layers",
    "Ledger": "slivertune.core.ledger",
    "ParkedLayers": "slivertune.parked",
    "SFT": "slivertune.sft",
    "SFTConfig": "slivertune.sft",
    "SparseDelta": "slivertune.deltas",
    "TokenTune": "slivertune.tokentune",
    "TokenTuneHandle": "slivertune.tokentune",
    "attach": "slivertune.interop",
    "attach_chunked_cross_entropy": "slivertune.chunked_loss",
    "chunked_cross_entropy": "slivertune.chunked_loss",
    "compile_blocks": "slivertune.core.compiled_blocks",
    "find_layers": "slivertune.core.layers",
    "initialize": "slivertune.parallel.initialize",
    "keep_activations": "slivertune.core.kept_activations",
    "load_quantized": "slivertune.parked",
    "offload_activations": "slivertune.core.offloaded_activations",
    "park_for_hift": "slivertune.hift",
    "park_layers": "slivertune.parked",
    "prepare": "slivertune.parallel.prepare",
    "tile_tokens": "slivertune.core.token_tiles",
    "why_not_chunked": "slivertune.chunked_loss",
}


__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF_NAME)
