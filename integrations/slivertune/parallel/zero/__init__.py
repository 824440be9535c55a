"""DeepSpeed's ZeRO-1, 2 and 3."""

from slivertune.parallel.zero.one_process import load_zero
from slivertune.parallel.zero.shares import fp32_weights

__all__ = ["fp32_weights", "load_zero"]
