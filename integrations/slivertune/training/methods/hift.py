"""`--method hift`: one group of layers an update."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from transformers import Trainer

from slivertune.hift import HiFT
from slivertune.interop import attach
from slivertune.training.methods.method import FEWEST_UPDATES_A_LINE, TrainingMethod
from slivertune.training.options.hift import HiFTArguments
from slivertune.training.options.method import Method
from slivertune.training.output.ledger_lines import Cycle, HiFTCycle

RATE_HINT = (
    "HiFT updates a parameter once in {cycle} updates here, and usually wants 2 to 4 times the learning rate of dense "
    "fine-tuning; --learning_rate was not given, so {rate:g} is used"
)


class HiFTMethod(TrainingMethod):
    """The Trainer's optimizer, wrapped by HiFT.

    Args:
        arguments: HiFT's settings.
        seed: The run's seed.
    """

    name: Method = "hift"

    def __init__(self, arguments: HiFTArguments, seed: int) -> None:
        self._arguments = arguments
        self._seed = seed
        self._attached: HiFT | None = None

    @property
    def optimizer(self) -> HiFT:
        """The optimizer.

        Raises:
            RuntimeError: If it is not attached.
        """
        if self._attached is None:
            raise RuntimeError("HiFT is attached to no Trainer; call attach first")
        return self._attached

    def facts(self) -> dict[str, Any]:
        """What decides whose turn it is."""
        names = ("layers_per_group", "steps_per_group", "order")
        return {"hift": {name: getattr(self._arguments, name) for name in names}}

    def attach(self, trainer: Trainer) -> None:
        """Make HiFT the Trainer's optimizer."""
        optimizer = attach(trainer, self._arguments.config(self._seed)).optimizer
        assert isinstance(optimizer, HiFT)
        self._attached = optimizer

    def cycle(self) -> Cycle:
        """As many rounds of all groups as fill a line."""
        return HiFTCycle(self.optimizer, self._rounds_a_line())

    def logging_steps(self) -> int:
        """A line for every cycle."""
        return self._rounds_a_line() * self.optimizer.cycle_length

    def lines(self) -> list[str]:
        """The groups and their order."""
        hift = self.optimizer
        num_layers = sum(len(group.layers) for group in hift.groups)
        turns = f"every group has had its turn after {hift.cycle_length} updates"
        return [f"  groups  {hift.num_groups} of {num_layers} layers, {hift.config.order}; {turns}"]

    def notes(self, model: torch.nn.Module, *, learning_rate: float | None) -> list[str]:
        """Warn of a rate that is meant for dense fine-tuning."""
        if learning_rate is None or self.optimizer.num_groups == 1:
            return []
        return [RATE_HINT.format(cycle=self.optimizer.cycle_length, rate=learning_rate)]

    def settings(self) -> dict[str, Any]:
        """All of HiFT's settings, and the number of groups that they made."""
        return {**asdict(self._arguments), "num_groups": self.optimizer.num_groups}

    def close(self) -> None:
        """Freezer the model."""
        if self._attached is not None:
            self._attached.detach()

    def _rounds_a_line(self) -> int:
        return math.ceil(FEWEST_UPDATES_A_LINE / self.optimizer.cycle_length)
