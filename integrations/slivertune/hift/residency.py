"""Where a group's masters and optimizer state live between its turns: the contract of the two ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slivertune.hift.rotation import LearningRate

ParamGroups = Sequence[dict[str, Any]]
"""The param groups of the optimizer that the user holds."""

WeightState = dict[str, Any]
"""One weight's state by key, tensors in the weight's own extent; `MASTER` is its fp32 master, if it has one."""

OwnHyperparameters = Mapping[int, dict[str, Any]]
"""What the base optimizer's instances changed in their param groups by themselves, by index of the param group."""

MASTER = "master"


class Residency(Protocol):
    """Owns the masters and the optimizer state of one group."""

    def prefetch(self) -> None:
        """Start to bring the first pieces to the device; called during backward, as often as one likes."""

    def step(self, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step the group's weights from their gradients, and drop the gradients.

        Raises:
            OSError: If the state has no room; nothing was stepped then.
        """

    def export(self) -> dict[str, WeightState]:
        """The state of every weight that has some, by name. Tensors are the living ones where they can be."""

    def own_hyperparameters(self) -> OwnHyperparameters:
        """What the instances adapted by themselves; empty where they adapt nothing.

        Raises:
            RuntimeError: If the pieces of one group adapted differently, which no element-wise optimizer does.
        """

    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        """Replace all state by a copy of what `export` and `own_hyperparameters` returned."""

    def discard(self) -> None:
        """Forget all state."""
