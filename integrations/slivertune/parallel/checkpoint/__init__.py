"""Checkpoints of several ranks: a method's own state, manifests, and sharded weights."""

from slivertune.parallel.checkpoint.sidecar import load_state, save_state

__all__ = ["load_state", "save_state"]
