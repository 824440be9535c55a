"""The methods of `slivertune train`: their options, their changes to model and Trainer, and their output."""

from slivertune.training.methods.method import SliverMethod, TrainingMethod
from slivertune.training.methods.registry import register_method

__all__ = ["SliverMethod", "TrainingMethod", "register_method"]
