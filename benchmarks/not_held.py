"""HiFT (m = 1) for `quality.py` with a rate that changes within a cycle, where the paper holds it (section 4.6).

Few lines over `slivertune train --method hift`: before each update a callback drops the rate that HiFT holds.
"""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune import HiFT
from slivertune.parallel.checkpoint.sidecar import unwrapped
from slivertune.training.methods.hift import HiFTArguments, HiFTMethod
from slivertune.training.methods.method import NoOptions
from slivertune.training.methods.registry import register_train_method


class NotHeldMethod(HiFTMethod):
    name = "hift-not-held"
    help = "one group of layers an update, each at the rate of the schedule"
    options_class = NoOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(HiFTArguments())

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"learning_rate": HiFTMethod.embedded_defaults({"layers_per_group": "1"})["learning_rate"]}

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        trainer.add_callback(_DropHeldRate())


class _DropHeldRate(TrainerCallback):
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        unwrapped(optimizer, HiFT).rotation.held_lr = []


def register() -> None:
    """Let `slivertune train --method` take it."""
    register_train_method(NotHeldMethod)
