"""State that stays on the device: `state="device"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from slivertune.core.ledger import claim
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.masters import refresh_master
from slivertune.hift.nested_state import flatten_state, unflatten_state
from slivertune.hift.piece import Piece, Slice, Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import (
    MASTER,
    OwnHyperparameters,
    ParamGroups,
    Residency,
    WeightState,
    common_hyperparameters,
)
from slivertune.hift.rotation import LearningRate


class ResidentGroup(Residency):
    """A group whose masters and state never leave the device; see `Residency`.

    Args:
        weights: What the group trains.
        base: The base optimizer; one instance steps the whole group, or one each weight.
        meter: Measures its steps.
        with_masters: Whether 16-bit weights get an fp32 master.
        by_weight: Whether `step_weight` is used, and not `step`.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        base: BaseOptimizer,
        meter: StepMeter,
        *,
        with_masters: bool,
        by_weight: bool = False,
    ) -> None:
        self._weights = tuple(weights)
        self._base = base
        self._meter = meter
        self._with_masters = with_masters
        self._num_pieces = len(self._weights) if by_weight else 1
        self._pieces: dict[str, Piece] = {}
        """By the name of its first weight."""
        self._restored: dict[str, WeightState] = {}
        self._restored_own: OwnHyperparameters = {}

    @override
    def prefetch(self) -> None:
        """Nothing is elsewhere."""

    @override
    def step(self, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        self._step(self._weights, param_groups, held_lr)

    @override
    def begin_weights(self) -> None:
        """Nothing has to be found room for."""

    @override
    def step_weight(self, weight: Weight, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        self._step((weight,), param_groups, held_lr)

    @override
    def end_weights(self) -> None:
        """Nothing is kept."""

    def _step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        piece = self._pieces.get(weights[0].name) or self._make_piece(weights, param_groups)
        for one in piece.slices:
            if one.on_master:
                refresh_master(one.leaf.data, one.part_of_weight())
            one.attach_gradient()
        piece.step(param_groups, held_lr)
        for one in piece.slices:
            if not one.is_weight:
                one.part_of_weight().copy_(one.leaf.data)
            one.drop_gradient()
            for value in flatten_state(piece.state_of(one)).values():
                if isinstance(value, torch.Tensor):
                    claim(value, "state")

    @override
    def export(self) -> dict[str, WeightState]:
        exported = {name: dict(state) for name, state in self._restored.items()}
        for weight in self._weights:
            if MASTER in exported.get(weight.name, {}):
                arrived = exported[weight.name][MASTER].clone()
                exported[weight.name][MASTER] = refresh_master(arrived, weight.parameter.detach().to(arrived.device))
        for piece in self._pieces.values():
            for one in piece.slices:
                if one.on_master:
                    refresh_master(one.leaf.data, one.part_of_weight())
                master = {} if one.is_weight else {MASTER: one.leaf.data}
                exported[one.weight.name] = {**master, **piece.state_of(one)}
        order = [weight.name for weight in self._weights]
        return {name: exported[name] for name in order if exported.get(name)}

    @override
    def own_hyperparameters(self) -> OwnHyperparameters:
        return common_hyperparameters(list(self._pieces.values()), self._base.name) or self._restored_own

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        self._restored, self._restored_own = {name: dict(values) for name, values in state.items()}, own

    @override
    def discard(self) -> None:
        self._pieces = {}
        self._restored, self._restored_own = {}, {}

    def _make_piece(self, weights: Sequence[Weight], param_groups: ParamGroups) -> Piece:
        slices = []
        for weight in weights:
            on_master = self._with_masters and weight.has_master
            one = Slice(weight, 0, weight.parameter.numel(), on_master=on_master)
            if on_master:
                source = self._restored.get(weight.name, {}).get(MASTER, weight.parameter.data)
                master = source.to(device=weight.parameter.device, dtype=torch.float32, copy=True)
                claim(master, "state")
                one.place_leaf(master)
            slices.append(one)
        piece = Piece(slices, self._base)
        for one in slices:
            piece.put_state(param_groups, one, self._on_device(one))
            self._restored.pop(one.weight.name, None)
        if self._restored_own:
            piece.restore_hyperparameters(param_groups, self._restored_own)
        self._pieces[weights[0].name] = piece
        if len(self._pieces) == self._num_pieces:
            self._restored_own = {}
        return piece

    def _on_device(self, one: Slice) -> WeightState:
        """Copies of the state that was restored for a slice: tensors with dimensions are on its weight's device."""
        state: WeightState = {}
        on_device = self._meter.scalars_on_device(one.weight, one.leaf.dtype)
        for key, value in flatten_state(self._restored.get(one.weight.name, {}), copy_objects=True).items():
            if isinstance(value, torch.Tensor):
                with_weight = value.dim() or key in on_device
                value = value.to(one.weight.parameter.device if with_weight else "cpu", copy=True)
            state[key] = value
        state.pop(MASTER, None)
        return unflatten_state(state)
