"""Steps the group whose turn it is, and hands the turn on (HiFT, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import HiFTConfig
from slivertune.hift.groups import Group, turn_order
from slivertune.hift.model_hooks import ModelHooks
from slivertune.hift.offload_buffer import disk_buffer, host_buffer
from slivertune.hift.piece import Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import MASTER, OwnHyperparameters, ParamGroups, Residency, WeightState
from slivertune.hift.resident import ResidentGroup
from slivertune.hift.rotation import LearningRate, Rotation, scheduled_lr
from slivertune.hift.skipping import SkipNotices
from slivertune.hift.streamed import StreamedGroup


class GroupSteps:
    """The groups' masters and state, and the steps on them.

    Args:
        groups: All groups, bottom of the model first.
        base: The base optimizer.
        meter: Measures its steps.
        config: HiFT's settings.
    """

    def __init__(self, groups: Sequence[Group], base: BaseOptimizer, meter: StepMeter, config: HiFTConfig) -> None:
        self._base = base
        self._meter = meter
        self._config = config
        self._notices = SkipNotices(groups)
        self._applying: list[LearningRate] = []
        self.rotation = Rotation(
            order=turn_order(len(groups), config.order, config.seed), steps_per_group=config.steps_per_group
        )
        """Whose turn it is."""
        self.weights: list[tuple[Weight, ...]] = []
        """What each group trains."""
        self.residencies: list[Residency] = []
        """Where each group's masters and state are."""

    def bind(self, weights: list[tuple[Weight, ...]]) -> None:
        """Train these weights, group by group, with fresh state."""
        self.weights = weights
        self.residencies = [self._make_residency(each) for each in weights]

    @property
    def active_weights(self) -> tuple[Weight, ...]:
        """What the active group trains."""
        return self.weights[self.rotation.active_group]

    @property
    def active_residency(self) -> Residency:
        """Where the active group's masters and state are."""
        return self.residencies[self.rotation.active_group]

    def activate(self, hooks: ModelHooks) -> None:
        """Let the active group have gradients, and no other."""
        hooks.activate(self.active_weights, self.active_residency)

    def begin_in_backward(self, param_groups: ParamGroups) -> None:
        """Make ready for `step_in_backward`, whose first call in an update this precedes.

        Args:
            param_groups: The optimizer's.
        """
        self.active_residency.begin_weights()
        self._applying = self.rotation.to_apply(scheduled_lr(param_groups))

    def step_in_backward(self, weight: Weight, param_groups: ParamGroups) -> None:
        """Step one of the active group's weights from its gradient, and drop the gradient.

        Args:
            weight: The weight.
            param_groups: The optimizer's.
        """
        self.active_residency.step_weight(weight, param_groups, self._applying)

    def step(self, param_groups: ParamGroups, hooks: ModelHooks) -> None:
        """Step the active group if gradients have reached it, and hand the turn on.

        Args:
            param_groups: The optimizer's.
            hooks: Knows whether a backward ran, and lets the next group have gradients.
        """
        group, in_backward, watch = self.rotation.active_group, hooks.in_backward, hooks.watch
        is_stepped = in_backward is not None and in_backward.close()
        missed = watch.missed
        watch.forget()
        if in_backward is None:
            is_stepped = self._step_from_gradients(param_groups)
        elif is_stepped:
            self.active_residency.end_weights()
        if is_stepped:
            count = partial(self.rotation.advance, self._applying)
        elif missed:
            self._notices.skipped(group)
            count = partial(self.rotation.skip, scheduled_lr(param_groups))
        else:
            return
        if self._config.state == "discard" and self.rotation.ends_turn:
            self.active_residency.discard()
        count()
        if self.rotation.active_group != group:
            self.activate(hooks)
        self._notices.unreached(self.rotation.unreached)

    def _step_from_gradients(self, param_groups: ParamGroups) -> bool:
        arrived = [weight.take_gradient() for weight in self.active_weights]
        if not any(arrived):
            return False
        self._applying = self.rotation.to_apply(scheduled_lr(param_groups))
        self.active_residency.step(param_groups, self._applying)
        return True

    def export(self) -> tuple[dict[str, WeightState], dict[int, OwnHyperparameters]]:
        """The state of every weight that has some, by name, and by group what instances adapted by themselves."""
        state: dict[str, WeightState] = {}
        own: dict[int, OwnHyperparameters] = {}
        for index, residency in enumerate(self.residencies):
            state.update(residency.export())
            adapted = residency.own_hyperparameters()
            if adapted:
                own[index] = dict(adapted)
        return state, own

    def restore(self, state: Mapping[str, WeightState], own: Mapping[int, OwnHyperparameters]) -> None:
        """Replace all state by a copy of what `export` returned, and set weights to their masters, rounded."""
        for index, (weights, residency) in enumerate(zip(self.weights, self.residencies, strict=True)):
            residency.restore({w.name: state[w.name] for w in weights if w.name in state}, own.get(index, {}))
        with torch.no_grad():
            for weight in (weight for weights in self.weights for weight in weights):
                if MASTER in state.get(weight.name, {}):
                    weight.parameter.copy_(state[weight.name][MASTER])

    def _make_residency(self, weights: Sequence[Weight]) -> Residency:
        config = self._config
        if config.state == "device":
            return ResidentGroup(
                weights,
                self._base,
                self._meter,
                with_masters=config.master != "none",
                by_weight=config.step_in_backward,
            )
        on_disk = config.state == "disk"
        return StreamedGroup(
            weights,
            self._base,
            self._meter,
            master=config.master,
            stream_bytes=config.piece_bytes,
            make_buffer=(lambda _: disk_buffer(Path(config.state_dir or "."))) if on_disk else host_buffer,
            reserve_always=on_disk,
            by_weight=config.step_in_backward,
        )
