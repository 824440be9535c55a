"""Where a group's masters and optimizer state live between its turns: the contract of the two ways."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slivertune.core.hyperparameters import differs
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import HiFTConfig
from slivertune.hift.cutting import PieceCutter
from slivertune.hift.piece import OwnHyperparameters, ParamGroups, Piece, Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import LearningRate

WeightState = dict[str, Any]
"""One weight's state by key, tensors in the weight's own extent; `MASTER` is its fp32 master, if it has one."""

MASTER = "master"


class Residency(ABC):
    """Owns the masters and the optimizer state of one group.

    Args:
        weights: What the group trains.
        base: The base optimizer; one instance steps a piece of the group.
        meter: Measures its steps.
        config: HiFT's settings.
    """

    def __init__(self, weights: Sequence[Weight], base: BaseOptimizer, meter: StepMeter, config: HiFTConfig) -> None:
        self._weights = weights
        self._base = base
        self._config = config
        self._cutter = PieceCutter(weights, base, meter, config)
        self._pieces: list[Piece] = []
        self._restored_own: OwnHyperparameters = {}

    @abstractmethod
    def prefetch(self) -> None:
        """Start to bring the first pieces to the device; called during backward, as often as one likes."""

    @abstractmethod
    def begin(self) -> None:
        """Make ready for `step`, whose first call in an update this precedes.

        Raises:
            OSError: If the state has no room; nothing was stepped then.
        """

    @abstractmethod
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step weights from their gradients, and drop the gradients.

        Args:
            weights: The whole group, or one of its weights where `step_in_backward` steps each alone.
            param_groups: The optimizer's.
            held_lr: What is applied, one a param group.
        """

    @abstractmethod
    def end(self) -> None:
        """Let go of what is kept on the device from one `step` of an update to the next."""

    @abstractmethod
    def export(self) -> dict[str, WeightState]:
        """The state of every weight that has some, by name. Tensors are the living ones where they can be."""

    @abstractmethod
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        """Replace all state by a copy of what `export` and `own_hyperparameters` returned."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all state."""

    def own_hyperparameters(self) -> OwnHyperparameters:
        """What the base optimizer's instances adapted by themselves; empty where they adapt nothing.

        Raises:
            RuntimeError: If the pieces of one group adapted differently, which no element-wise optimizer does.
        """
        common: dict[int, dict[str, Any]] = {}
        instances = [piece.instance for piece in self._pieces if piece.instance is not None]
        for instance in instances:
            for index, values in instance.adapted().items():
                known = common.setdefault(index, values)
                if known.keys() != values.keys() or any(differs(known[key], values[key]) for key in known):
                    raise RuntimeError(
                        f"the pieces of one group adapted {sorted(known | values)} differently, so "
                        f"{self._base.name} is not element-wise; set elementwise=False"
                    )
        # What was restored counts until all pieces have got it.
        return common or (self._restored_own if len(instances) < max(1, len(self._pieces)) else {})


def export_state(residencies: Sequence[Residency]) -> tuple[dict[str, WeightState], dict[int, OwnHyperparameters]]:
    """The state of every weight that has some, by name, and by group what instances adapted by themselves.

    Args:
        residencies: Of all groups, by index.
    """
    state = {name: values for each in residencies for name, values in each.export().items()}
    adapted = {index: each.own_hyperparameters() for index, each in enumerate(residencies)}
    return state, {index: dict(own) for index, own in adapted.items() if own}


@torch.no_grad()
def restore_state(
    residencies: Sequence[Residency],
    weights_of: Sequence[Sequence[Weight]],
    state: Mapping[str, WeightState],
    own: Mapping[int, OwnHyperparameters],
) -> None:
    """Replace all state by a copy of what `export_state` returned, and set weights to their masters, rounded.

    Args:
        residencies: Of all groups, by index.
        weights_of: What each group trains.
        state: By name of the weight.
        own: By group.
    """
    for index, (residency, weights) in enumerate(zip(residencies, weights_of, strict=True)):
        residency.restore({w.name: state[w.name] for w in weights if w.name in state}, own.get(index, {}))
    for weight in (weight for weights in weights_of for weight in weights):
        if MASTER in state.get(weight.name, {}):
            weight.parameter.copy_(state[weight.name][MASTER])
