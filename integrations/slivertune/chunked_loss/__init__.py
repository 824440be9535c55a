"""Cross-entropy computed from hidden states, without ever holding the logits or their gradient whole."""

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
