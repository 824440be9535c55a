"""`--method dense`: trains all weights in every update, as the stock Trainer does."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from slivertune.parallel.layout import layout_of
from slivertune.training.methods.method import TrainingMethod
from slivertune.training.options.methods import DENSE


class DenseMethod(TrainingMethod):
    """Dense fine-tuning: all weights in every update."""

    about = DENSE
    _engine_keeps_masters = False

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the best learning rate of 1e-3, 2e-3 and 3e-3."""
        return {"learning_rate": 2e-3}

    def attach(self, trainer: Trainer) -> None:
        """Record whether DeepSpeed trains, which keeps fp32 master weights itself."""
        self._engine_keeps_masters = layout_of(trainer.accelerator).startswith("zero")

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of bf16 weights without master weights."""
        if self._engine_keeps_masters or all(each.dtype != torch.bfloat16 for each in model.parameters()):
            return []
        return ["dense fine-tuning of bf16 weights keeps no fp32 masters, so updates below their last bit are lost"]
