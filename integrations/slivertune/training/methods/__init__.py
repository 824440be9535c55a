"""The methods of `slivertune train`: what each does to the model and to the Trainer, and says of itself."""

from __future__ import annotations

from slivertune.training.methods.choice import choose_method
from slivertune.training.methods.method import DenseMethod, TrainingMethod

__all__ = ["DenseMethod", "TrainingMethod", "choose_method"]
