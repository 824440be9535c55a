"""`--method dense`: all weights every update, as the Trainer does it."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from slivertune.parallel.layout import layout_of
from slivertune.training.methods.method import TrainingMethod


class DenseMethod(TrainingMethod):
    """All weights every update."""

    name = "dense"
    help = "all weights every update"
    _engine_keeps_masters = False

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The best rate of 1e-3, 2e-3 and 3e-3."""
        return {"learning_rate": 2e-3}

    def attach(self, trainer: Trainer) -> None:
        """See whether DeepSpeed trains, which keeps fp32 masters itself."""
        self._engine_keeps_masters = layout_of(trainer.accelerator).startswith("zero")

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of weights without masters."""
        if self._engine_keeps_masters or all(each.dtype != torch.bfloat16 for each in model.parameters()):
            return []
        return ["dense fine-tuning of bf16 weights keeps no fp32 masters; updates below a weight's last bit are lost"]
