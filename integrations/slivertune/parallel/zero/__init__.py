"""DeepSpeed's ZeRO-1, 2 and 3."""

from slivertune.parallel.zero.shares import fp32_weights, load_zero

__all__ = ["fp32_weights", "load_zero"]
