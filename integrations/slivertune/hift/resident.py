"""State that stays on the device: `state="device"`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.ledger import claim
from slivertune.hift.masters import refresh_master
from slivertune.hift.nested_state import flatten_state, unflatten_state
from slivertune.hift.piece import Instance, OwnHyperparameters, ParamGroups, Piece, Slice, Weight
from slivertune.hift.residency import MASTER, Residency, WeightState
from slivertune.hift.rotation import LearningRate


class ResidentGroup(Residency):
    """A group whose masters and state never leave the device; see `Residency`.

    One instance of the base optimizer steps the whole group, or, with `step_in_backward`, one each weight.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._restored: dict[str, WeightState] = {}

    @override
    def prefetch(self) -> None:
        """Nothing is elsewhere."""

    @override
    def begin(self) -> None:
        """Nothing has to be found room for."""

    @override
    def end(self) -> None:
        """Nothing is kept."""

    @override
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        self._pieces = self._pieces or self._cutter.cut()
        piece = next(each for each in self._pieces if each.slices[0].weight is weights[0])
        instance = piece.instance or self._build(piece, param_groups)
        for one in piece.slices:
            if one.on_master:
                refresh_master(one.leaf.data, one.part_of_weight())
            one.attach_gradient()
        instance.push(param_groups, held_lr)
        instance.optimizer.step()
        for one in piece.slices:
            if not one.is_weight:
                one.part_of_weight().copy_(one.leaf.data)
            one.drop_gradient()
            for value in flatten_state(instance.optimizer.state.get(one.leaf, {})).values():
                if isinstance(value, torch.Tensor):
                    claim(value, "state")

    @override
    def export(self) -> dict[str, WeightState]:
        exported = {name: dict(state) for name, state in self._restored.items()}
        for weight in self._weights:
            if MASTER in exported.get(weight.name, {}):
                arrived = exported[weight.name][MASTER].clone()
                exported[weight.name][MASTER] = refresh_master(arrived, weight.parameter.detach().to(arrived.device))
        for piece in self._pieces:
            if piece.instance is None:
                continue
            for one in piece.slices:
                if one.on_master:
                    refresh_master(one.leaf.data, one.part_of_weight())
                master = {} if one.is_weight else {MASTER: one.leaf.data}
                exported[one.weight.name] = {**master, **piece.instance.optimizer.state.get(one.leaf, {})}
        order = [weight.name for weight in self._weights]
        return {name: exported[name] for name in order if exported.get(name)}

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        self._restored, self._restored_own = {name: dict(values) for name, values in state.items()}, own

    @override
    def discard(self) -> None:
        self._pieces = []
        self._restored, self._restored_own = {}, {}

    def _build(self, piece: Piece, param_groups: ParamGroups) -> Instance:
        for one in piece.slices:
            if one.on_master:
                weight = one.weight
                source = self._restored.get(weight.name, {}).get(MASTER, weight.parameter.data)
                master = source.to(device=weight.parameter.device, dtype=torch.float32, copy=True)
                claim(master, "state")
                one.place_leaf(master)
        instance = piece.build(self._base, param_groups, self._restored_own)
        for one in piece.slices:
            state = self._on_device(one)
            if state:
                instance.optimizer.state[one.leaf] = state
            self._restored.pop(one.weight.name, None)
        return instance

    def _on_device(self, one: Slice) -> WeightState:
        """Copies of the state that was restored for a slice: tensors with dimensions are on its weight's device."""
        state: WeightState = {}
        for key, value in flatten_state(self._restored.get(one.weight.name, {}), copy_objects=True).items():
            if isinstance(value, torch.Tensor):
                with_weight = value.dim() or key in one.scalars_on_device
                value = value.to(one.weight.parameter.device if with_weight else "cpu", copy=True)
            state[key] = value
        state.pop(MASTER, None)
        return unflatten_state(state)
