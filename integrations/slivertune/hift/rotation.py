"""Groups of layers, their turns, and the learning rate held for a cycle (HiFT, Algorithm 1 and section 3.1)."""

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from slivertune.core.hyperparameters import own_copy
from slivertune.core.layers import Layer
from slivertune.core.parameters import NOTHING_TRAINS
from slivertune.core.sliver import IDLE_STEPS
from slivertune.core.typed_command import setting_name
from slivertune.hift.config import Order

LearningRate = float | torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers that train together."""

    index: int
    """Position from the bottom of the model, in [0, k)."""
    layers: tuple[Layer, ...]
    """Layers of the group, bottom first."""
    parameter_names: tuple[str, ...]
    """Names of the trained parameters, as in `model.named_parameters()`."""


def count_per_group(layers_per_group: float | Literal["all", "auto"], num_layers: int) -> int:
    """Return the number of layers per group.

    Args:
        layers_per_group: The number itself, a share of the layers, which is rounded up, or "all".
        num_layers: Layers that train (n).

    Raises:
        ValueError: If it is "auto", which nothing has chosen yet.
    """
    if layers_per_group == "all":
        return num_layers
    if isinstance(layers_per_group, str):
        raise ValueError(
            "layers_per_group='auto' is chosen by slivertune.attach and by slivertune train, which know the batch. "
            "Give a number here, for example the one that `slivertune plan --layers_per_group auto` prints"
        )
    if not isinstance(layers_per_group, float):
        return layers_per_group
    return max(1, math.ceil(layers_per_group * num_layers - 1e-9))  # 0.1 * 30 is more than 3


def cut_groups(
    layers: Sequence[Layer], layers_per_group: float | Literal["all", "auto"], trainable: frozenset[str]
) -> tuple[Group, ...]:
    """Cut n layers into k = ceil(n / m) groups, from the bottom. The last may be smaller.

    Args:
        layers: Layers of the model, bottom first.
        layers_per_group: Layers per group (m), in [1, n], a share of n, or "all".
        trainable: Names of the parameters that may train. A layer without any takes no part.

    Returns:
        Groups, bottom first. Their membership never changes.

    Raises:
        ValueError: If no parameter trains, m is larger than the number of layers that train, or m is "auto".
    """
    training = [layer for layer in layers if not trainable.isdisjoint(layer.parameter_names)]
    if not training:
        raise ValueError(NOTHING_TRAINS)
    number = count_per_group(layers_per_group, len(training))
    if number > len(training):
        raise ValueError(
            f"layers_per_group={layers_per_group} must be in [1, {len(training)}], the number of layers that train. "
            f"{len(training)} trains the whole model in every step"
        )
    groups = []
    for index, start in enumerate(range(0, len(training), number)):
        members = tuple(training[start : start + number])
        names = tuple(name for layer in members for name in layer.parameter_names if name in trainable)
        groups.append(Group(index=index, layers=members, parameter_names=names))
    return tuple(groups)


def turn_order(num_groups: int, order: Order, seed: int) -> tuple[int, ...]:
    """Return the groups' indices in the order of their turns, the same in every cycle.

    Args:
        num_groups: Number of groups (k).
        order: `bottom2up`, `top2down`, or `random`, which is shuffled once.
        seed: Seed of the shuffle.
    """
    indices = list(range(num_groups))
    if order == "top2down":
        indices.reverse()
    elif order == "random":
        random.Random(seed).shuffle(indices)
    return tuple(indices)


@dataclass(kw_only=True, slots=True)
class Rotation:
    """Counts of updates and of steps without an update, from which everything else follows. Picklable."""

    order: tuple[int, ...]
    """Group indices in the order of their turns."""
    steps_per_group: int
    """Steps per turn."""
    updates: int = 0
    """Updates applied so far."""
    held_lr: list[LearningRate] = field(default_factory=list)
    """Learning rates of the current cycle, one per param group, empty before the first step."""
    skipped: dict[int, int] = field(default_factory=dict)
    """Steps by group that passed without an update, because no gradient reached the group."""
    skipped_in_cycle: dict[int, int] = field(default_factory=dict)
    """The same of the current cycle alone, or of the last one until the next begins."""
    warned_of_skip: set[int] = field(default_factory=set)
    """Groups with a warning that a batch did not reach them."""
    warned_of_cycle: set[int] = field(default_factory=set)
    """Groups with a warning that no batch of a whole cycle reached them."""
    idle_steps: int = 0
    """Calls of `step` since the last update or skip that were neither."""

    @property
    def steps(self) -> int:
        """Steps so far, with and without an update."""
        return self.updates + sum(self.skipped.values())

    @property
    def cycle_length(self) -> int:
        """Steps per cycle, in which every group has one turn."""
        return len(self.order) * self.steps_per_group

    @property
    def active_group(self) -> int:
        """Index of the active group."""
        return self.order[self.steps // self.steps_per_group % len(self.order)]

    @property
    def coming_groups(self) -> tuple[int, ...]:
        """All groups in the order of their next turns, the active one first."""
        place = self.steps // self.steps_per_group % len(self.order)
        return self.order[place:] + self.order[:place]

    @property
    def last_group(self) -> int:
        """Index of the last step's group or, before the first step, of the active group."""
        return self.order[max(0, self.steps - 1) // self.steps_per_group % len(self.order)]

    @property
    def starts_cycle(self) -> bool:
        """Whether the next step is the first of a cycle."""
        return self.steps % self.cycle_length == 0

    @property
    def ends_turn(self) -> bool:
        """Whether the next step is the last of the active group's turn."""
        return (self.steps + 1) % self.steps_per_group == 0

    @property
    def unreached(self) -> tuple[int, ...]:
        """Groups that every step of the cycle that has just ended passed over, none in mid-cycle."""
        if not self.starts_cycle:
            return ()
        return tuple(group for group, count in sorted(self.skipped_in_cycle.items()) if count == self.steps_per_group)

    def to_apply(self, scheduled: Sequence[LearningRate]) -> list[LearningRate]:
        """Return the learning rates of the next update: the schedule's if a cycle begins, else the held ones.

        Rates that are all 0, with which warm-ups begin, are not held: a whole cycle would train nothing.
        """
        if not self.starts_cycle and any(lr is None or lr != 0 for lr in self.held_lr):
            return self.held_lr
        return [own_copy(lr) for lr in scheduled]

    def advance(self, applied: list[LearningRate], *, is_reached: bool = True) -> None:
        """Count one update.

        Args:
            applied: Its learning rates.
            is_reached: Whether a gradient reached the active group; else only the layers above stepped.
        """
        self._begin_step(applied)
        if not is_reached:
            self._count_in_cycle()
        self.updates += 1

    def skip(self, scheduled: Sequence[LearningRate]) -> None:
        """Count one step of the active group without an update, which takes its place in the turn and the cycle.

        Args:
            scheduled: Learning rates of the schedule, which are held from here if a cycle begins.
        """
        group = self.active_group
        self._begin_step(self.to_apply(scheduled))
        self._count_in_cycle()
        self.skipped[group] = self.skipped.get(group, 0) + 1

    def _count_in_cycle(self) -> None:
        group = self.active_group
        self.skipped_in_cycle[group] = self.skipped_in_cycle.get(group, 0) + 1

    def warn_of_skip(self, groups: Sequence[Group], *, others_step: bool = False) -> None:
        """Warn, once per group, that a step of the active group passes because no gradient has reached it.

        Args:
            groups: All groups, by index.
            others_step: Whether the layers above have stepped.
        """
        group = self.active_group
        if group not in self.warned_of_skip:
            self.warned_of_skip.add(group)
            first, *others = groups[group].parameter_names
            follows = (
                "only the layers above it step in its turn"
                if others_step
                else "its turn passes without an update. optimizer.skipped_turns counts such steps"
            )
            warnings.warn(
                f"no gradient reached group {group} ({f'{first} and {len(others)} more' if others else first}): "
                f"{follows}. This warning comes once per group. If torch.utils.checkpoint runs a function of these "
                "weights, pass use_reentrant=False: use_reentrant=True loses their gradients",
                UserWarning,
                stacklevel=5,
            )

    def note_idle_step(self, groups: Sequence[Group]) -> None:
        """Count a call of `step` without a backward, or with dropped gradients, and warn if such calls go on.

        Args:
            groups: All groups, by index.
        """
        self.idle_steps += 1
        if self.idle_steps == IDLE_STEPS:
            warnings.warn(
                f"none of the last {IDLE_STEPS} calls of step() was an update: group {self.active_group} "
                f"({groups[self.active_group].parameter_names[0]}, ...) had no gradient. Call step() after the "
                "backward and before zero_grad()",
                UserWarning,
                stacklevel=5,
            )

    def warn_of_unreached(self, groups: Sequence[Group]) -> None:
        """Warn, once per group, that no batch of the cycle that has just ended has reached it.

        Args:
            groups: All groups, by index.
        """
        for group in set(self.unreached) - self.warned_of_cycle:
            self.warned_of_cycle.add(group)
            warnings.warn(
                f"no batch of a whole cycle reached group {group}, so it is not trained: "
                f"{', '.join(groups[group].parameter_names)}. If the loss does not depend on them, freeze them before "
                "HiFT is built. If they only now and then have a gradient, put them into one layer with others by "
                f"{setting_name('--layers', 'layers=')}, or raise layers_per_group",
                UserWarning,
                stacklevel=5,
            )

    def state(self) -> dict[str, Any]:
        """Return the rotation's state in plain containers, for `restore`."""
        return {
            "updates": self.updates,
            "held_lr": list(self.held_lr),
            "skipped_turns": dict(self.skipped),
            "skipped_in_cycle": dict(self.skipped_in_cycle),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`. States from before turns were skipped have no counts of them."""
        self.updates = state["updates"]
        self.held_lr = [own_copy(value) for value in state["held_lr"]]
        self.skipped = dict(state.get("skipped_turns", {}))
        self.skipped_in_cycle = dict(state.get("skipped_in_cycle", {}))

    def _begin_step(self, applied: list[LearningRate]) -> None:
        if self.starts_cycle:
            self.skipped_in_cycle = {}
        self.held_lr = applied
        self.idle_steps = 0


def scheduled_lr(param_groups: Sequence[Mapping[str, Any]]) -> list[LearningRate]:
    """Return the schedule's learning rate per param group, None if the base optimizer chooses by itself."""
    return [param_group.get("lr") for param_group in param_groups]
