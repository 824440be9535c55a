"""SFT's deltas as files: saved, loaded, applied to a model, and merged into checkpoints."""

from slivertune.deltas.applied import AppliedDeltas, apply
from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.delta_file import DeltaFile, load, save_pretrained

__all__ = ["AppliedDeltas", "DeltaFile", "SparseDelta", "apply", "load", "save_pretrained"]
