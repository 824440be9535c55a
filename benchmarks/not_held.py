"""HiFT for `quality.py` with a rate that changes within a cycle, where the paper holds it (section 4.6).

Few lines over `slivertune train --method hift`: before each update a callback drops the rate that HiFT holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune import HiFT
from slivertune.parallel.checkpoint.sidecar import unwrapped
from slivertune.training.methods.hift import HiFTArguments, HiFTMethod
from slivertune.training.methods.registry import register_train_method


@dataclass(frozen=True, kw_only=True, slots=True)
class NotHeldArguments:
    """The options of HiFT that rows of `quality.py` change; options of two methods need names of their own."""

    not_held_layers_per_group: int = field(default=1, metadata={"help": "layers of a group"})
    not_held_steps_per_group: int = field(default=1, metadata={"help": "updates before the next group's turn"})
    not_held_order: Literal["bottom2up", "top2down", "random"] = field(
        default="bottom2up", metadata={"help": "the groups' order"}
    )


class NotHeldMethod(HiFTMethod):
    name = "hift-not-held"
    help = "one group of layers an update, each at the rate of the schedule"
    options_class = NotHeldArguments

    def __init__(self, options: NotHeldArguments) -> None:
        super().__init__(
            HiFTArguments(
                layers_per_group=str(options.not_held_layers_per_group),
                steps_per_group=options.not_held_steps_per_group,
                order=options.not_held_order,
            )
        )

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        layers = str(given.get("not_held_layers_per_group", 1))
        return {"learning_rate": HiFTMethod.embedded_defaults({"layers_per_group": layers})["learning_rate"]}

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
