"""From the arguments to the method that they name."""

from __future__ import annotations

from slivertune.training.methods.hift import HiFTMethod
from slivertune.training.methods.lora import LoraMethod
from slivertune.training.methods.method import DenseMethod, TrainingMethod
from slivertune.training.methods.sft import SFTMethod
from slivertune.training.options.parse import TrainArguments


def choose_method(arguments: TrainArguments) -> TrainingMethod:
    """Make the method of a run.

    Args:
        arguments: The run's settings, which name it.
    """
    match arguments.method.method:
        case "hift":
            return HiFTMethod(arguments.hift, arguments.training.seed)
        case "sft":
            return SFTMethod(arguments.sft, arguments.training.seed)
        case "lora":
            return LoraMethod(arguments.lora, arguments.model.model_revision)
        case "dense":
            return DenseMethod()
