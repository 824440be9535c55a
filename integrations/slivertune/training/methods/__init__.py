"""The methods of `slivertune train`: what each does to the model and to the Trainer, and says of itself."""

from slivertune.training.methods.method import SliverMethod, TrainingMethod
from slivertune.training.methods.registry import register_train_method

__all__ = ["SliverMethod", "TrainingMethod", "register_train_method"]
