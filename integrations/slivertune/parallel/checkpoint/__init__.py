"""Checkpoints of several ranks: a method's own state, manifests, and weights that were saved in shards."""

from slivertune.parallel.checkpoint.sidecar import load_state, save_state

__all__ = ["load_state", "save_state"]
