"""LISA (Pan et al., 2024, section 3.2) for `quality.py`: embedding, head and a few blocks that are drawn at random.

Few lines over `slivertune train --method dense`: the Trainer's AdamW, of whose weights a callback lets those of the
drawn blocks have gradients, beside all that belongs to no block. The state of blocks that leave is dropped, so that
they begin anew when they are drawn again. Nothing of its memory is streamed or planned.
"""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core.layers import find_layers
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.methods.registry import register_train_method


@dataclass(frozen=True, kw_only=True, slots=True)
class LisaArguments:
    """LISA's settings."""

    lisa_blocks: int = field(default=2, metadata={"help": "lisa: blocks that train at a time (gamma)."})
    lisa_interval: int = field(default=20, metadata={"help": "lisa: updates between two draws (K)."})


class LisaMethod(DenseMethod):
    name = "lisa"
    help = "embedding, head, and blocks that are drawn every few updates"
    options_class = LisaArguments
    options: LisaArguments

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        trainer.add_callback(_DrawBlocks(trainer.model, self.options, trainer.args.seed))

    def facts(self) -> dict[str, Any]:
        return asdict(self.options)

    def settings(self) -> dict[str, Any]:
        return asdict(self.options)


class _DrawBlocks(TrainerCallback):
    """Decides before every update what trains; a draw depends on the seed and on its number alone."""

    def __init__(self, model: Any, options: LisaArguments, seed: int) -> None:
        self._options, self._seed = options, seed
        named = dict(model.named_parameters())
        blocks = [layer for layer in find_layers(model) if layer.kind == "block"]
        self._blocks: list[list[nn.Parameter]] = [[named[name] for name in each.parameter_names] for each in blocks]
        if not 1 <= options.lisa_blocks <= len(blocks):
            raise ValueError(f"lisa_blocks={options.lisa_blocks} must be in [1, {len(blocks)}], the model's blocks")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        number = state.global_step // self._options.lisa_interval
        drawn = random.Random(f"{self._seed} {number}").sample(range(len(self._blocks)), self._options.lisa_blocks)
        for index, block in enumerate(self._blocks):
            for parameter in block:
                parameter.requires_grad_(index in drawn)
                if index not in drawn:
                    optimizer.state.pop(parameter, None)


def register() -> None:
    """Let `slivertune train --method` take it."""
    register_train_method(LisaMethod)
