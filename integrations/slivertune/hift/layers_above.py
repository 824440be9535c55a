"""Steps of the layers above the active group (`inactive="above"`), in the backward that trains the group.

A backward down to the group passes through these layers anyway (BREAD, Luo et al., NeurIPS 2025). Each step is the
first of transformers' Adafactor: it depends on this gradient alone, so that no state lasts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from slivertune.hift.base import BaseOptimizer
from slivertune.hift.chunk import Weight
from slivertune.hift.config import HiFTConfig
from slivertune.hift.group_state import ResidentState
from slivertune.hift.parts import Part, Turn, Update
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import LearningRate, scheduled_lr
from slivertune.hift.unsupported import clash_of_rounding


class LayersAbove(Part):
    """Owner of the steps of all weights above the active group.

    Args:
        groups: Trained weights of each group, bottom of the model first.
        config: HiFT's settings.
        param_groups: Param groups of the user's optimizer.

    Raises:
        ValueError: If a weight is bf16 and not rounded stochastically, or the base optimizer has no learning rate.
    """

    def __init__(
        self, groups: Sequence[Sequence[Weight]], config: HiFTConfig, param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        from transformers.optimization import Adafactor  # takes seconds to import

        _rates(scheduled_lr(param_groups))
        dtypes = {weight.parameter.dtype for weights in groups for weight in weights}
        if torch.bfloat16 in dtypes and (clash := clash_of_rounding(config.inactive, config.master)) is not None:
            raise ValueError(clash)
        base = BaseOptimizer.of_class(Adafactor, {"scale_parameter": False, "relative_step": False, "lr": 0.0}, None)
        self._share = config.inactive_rate
        self._param_groups = [dict(base.defaults) for _ in param_groups]
        # There is no state to offload.
        on_device = replace(config, state="device", state_dir=None, state_ram_bytes=0, prefetch_bytes="auto")
        meter = StepMeter(base, self._param_groups, on_device)
        meter.compile_steps(each for weights in groups for each in weights)
        self._groups = [ResidentState(weights, meter) for weights in groups]
        self._group_of = {weight.name: index for index, weights in enumerate(groups) for weight in weights}
        self._active = 0
        self._applied: list[float] = []

    @override
    def begin_turn(self, turn: Turn) -> None:
        self._active = turn.group

    @property
    def weights(self) -> list[Weight]:
        """Weights above the active group."""
        return [weight for group in self._groups[self._active + 1 :] for weight in group.weights]

    @override
    def begin_step(self, update: Update) -> None:
        """Prepare the steps of an update.

        Raises:
            ValueError: If the base optimizer has no learning rate any more.
        """
        self._applied = [self._share * rate for rate in _rates(update.rates)]
        for group in self._groups[self._active + 1 :]:
            group.begin(stays=False, update=update.number)

    def holds(self, weight: Weight) -> bool:
        """Return whether a weight is above the active group."""
        return self._group_of[weight.name] > self._active

    @torch.no_grad()
    def step(self, weight: Weight) -> None:
        """Step a weight above the active group from its gradient, and drop the gradient."""
        group = self._groups[self._group_of[weight.name]]
        group.forget_moments()  # of the last step, which may have failed
        group.step((weight,), self._param_groups, self._applied)


def _rates(given: Sequence[LearningRate]) -> list[float]:
    if None in given:
        raise ValueError(
            "inactive='above' takes a share of the learning rate, and this optimizer chooses it by itself (lr=None). "
            "Give it one, or use inactive='frozen'"
        )
    return [float(rate) for rate in given if rate is not None]
