"""Where a group's masters and optimizer state live between its turns: the contract of the two ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slivertune.core.hyperparameters import differs
from slivertune.hift.piece import Piece, Weight
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

    def begin_weights(self) -> None:
        """Make ready for `step_weight`, whose first call in a turn this precedes.

        Raises:
            OSError: If the state has no room.
        """

    def step_weight(self, weight: Weight, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step one of the group's weights from its gradient, and drop the gradient; for groups that step by weight."""

    def end_weights(self) -> None:
        """Let go of what `step_weight` keeps on the device from one weight to the next."""

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


def common_hyperparameters(pieces: Sequence[Piece], optimizer_name: str) -> OwnHyperparameters:
    """What the instances of a group's pieces adapted, which must be the same in all that have stepped.

    Raises:
        RuntimeError: If it is not.
    """
    own: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for index, values in piece.own_hyperparameters().items():
            known = own.setdefault(index, values)
            if known.keys() != values.keys() or any(differs(known[key], values[key]) for key in known):
                raise RuntimeError(
                    f"the pieces of one group adapted {sorted(known | values)} differently, so "
                    f"{optimizer_name} is not element-wise; set elementwise=False"
                )
    return own
