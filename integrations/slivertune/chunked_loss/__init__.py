"""Cross-entropy straight from hidden states: neither logits nor their gradient ever exist whole."""

from slivertune.chunked_loss.function import CHUNK_BYTES, chunked_cross_entropy
from slivertune.chunked_loss.handle import (
    ChunkedCrossEntropyHandle,
    attach_chunked_cross_entropy,
    why_not_chunked,
)

__all__ = [
    "CHUNK_BYTES",
    "ChunkedCrossEntropyHandle",
    "attach_chunked_cross_entropy",
    "chunked_cross_entropy",
    "why_not_chunked",
]
