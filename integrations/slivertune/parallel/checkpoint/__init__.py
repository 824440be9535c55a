"""Checkpoints of several ranks: a folder of the method's own, manifests, and weights that were saved in shards."""

from slivertune.parallel.checkpoint.hift_sidecar import load_hift, save_hift
from slivertune.parallel.checkpoint.sft_sidecar import load_sft, save_sft

__all__ = ["load_hift", "load_sft", "save_hift", "save_sft"]
