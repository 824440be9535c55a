"""Storage of a group's masters and optimizer state between its turns: here on the device, and as `streamed` off it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slivertune.core.hyperparameters import differs
from slivertune.core.ledger import claim
from slivertune.hift.cutting import cut_group
from slivertune.hift.masters import refresh_master
from slivertune.hift.nested_state import flatten_state, unflatten_state
from slivertune.hift.piece import Instance, OwnHyperparameters, ParamGroups, Piece, Slice, Weight, check_rules
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import LearningRate
from slivertune.hift.stochastic_rounding import StochasticRounding, rounding_of

WeightState = dict[str, Any]
"""State of one weight by key, tensors in the weight's own extent. `MASTER` is its fp32 master, if it has one."""

MASTER = "master"


class ResidentGroup:
    """Owner of one group's masters and optimizer state, which never leave the device (`state="device"`).

    One instance of the base optimizer steps the whole group. With stepped gradients or stochastic rounding, each weight
    has its own.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
    """

    def __init__(self, weights: Sequence[Weight], meter: StepMeter) -> None:
        self.weights = tuple(weights)
        self._meter = meter
        self._pieces: list[Piece] = []
        self._restored: dict[str, WeightState] = {}
        self._restored_own: OwnHyperparameters = {}
        self._rounding: StochasticRounding | None = None
        """Rounding of the current update, if weights have fp32 copies that are no masters."""

    @property
    def is_offloaded(self) -> bool:
        """Whether there is state, and it is stored off the device."""
        return False

    def prefetch(self, *, in_backward: bool = False) -> None:
        """Begin to load the first chunks to the device. May be called repeatedly from the beginning of the turn on.

        Args:
            in_backward: Whether a gradient of the group has arrived. The working chunks are then loaded in any case.
        """

    def load_gradients(self) -> None:
        """Begin to load offloaded gradients: only a running backward may still add to them."""

    def release(self, to_bytes: int | None = None) -> None:
        """Evict loaded chunks, so that at most `to_bytes` bytes stay allocated on the device for chunks to come.

        Args:
            to_bytes: Bytes that stay allocated; None for those that the setting allows.
        """

    def begin(self, *, stays: bool, update: int) -> None:
        """Prepare an update, before its first call of `step`.

        Args:
            stays: Whether the next update is this group's, too.
            update: Number of updates before this one.

        Raises:
            OSError: If the state has no room. After any error here, nothing was stepped.
            ValueError: If a hyperparameter has changed for which the rule of steps in tiles does not hold.
        """
        self._rounding = rounding_of(self._meter.config, update)
        self._pieces = self._pieces or cut_group(self.weights, self._meter)
        check_rules(self._pieces, self._meter.param_groups)

    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step weights from their gradients, and drop the gradients.

        Args:
            weights: The whole group, or one of its weights if stepped gradients step each alone.
            param_groups: Param groups of the optimizer.
            held_lr: Learning rates to apply, one per param group.
        """
        names = {weight.name for weight in weights}
        for piece in self._pieces:
            if piece.slices[0].weight.name in names:
                self._step_resident(piece, param_groups, held_lr)

    def _step_resident(self, piece: Piece, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        rounded = [one for one in piece.slices if one.is_rounded]
        try:
            for one in rounded:
                one.place_leaf(one.part_of_weight().to(torch.float32))
            instance = piece.instance or self._build(piece, param_groups)
            for one in piece.slices:
                if one.on_master:
                    refresh_master(one.leaf.data, one.part_of_weight())
                one.attach_gradient()
            instance.push(param_groups, held_lr)
            instance.step(self._rounding)
            for one in piece.slices:
                one.write_weight(self._rounding)
                one.drop_gradient(is_last=one.stop == one.weight.parameter.numel())
                for value in flatten_state(instance.optimizer.state.get(one.leaf, {})).values():
                    if isinstance(value, torch.Tensor):
                        claim(value, "state")
        finally:
            for one in rounded:
                one.place_leaf(torch.empty(0, dtype=one.leaf.dtype, device="cpu"))

    def forget_state(self) -> None:
        """Forget all state, but keep the chunks, so that the next step begins it again."""
        for piece in self._pieces:
            if piece.instance is not None:
                piece.instance.optimizer.state.clear()

    def end(self) -> None:
        """Release everything that is kept on the device from one `step` of an update to the next."""

    def export(self, *, lasts: bool = True) -> dict[str, WeightState]:
        """Return the state of every weight that has some, by name. Tensors are not copied if they need not be.

        Args:
            lasts: Whether they are read after another group's were requested. If not, `state="disk"` saves a read.
        """
        exported = {name: dict(state) for name, state in self._restored.items()}
        for weight in self.weights:
            if MASTER in exported.get(weight.name, {}):
                arrived = exported[weight.name][MASTER].clone()
                exported[weight.name][MASTER] = refresh_master(arrived, weight.parameter.detach().to(arrived.device))
        for piece in self._pieces:
            if piece.instance is None:
                continue
            for one in piece.slices:
                if one.on_master:
                    refresh_master(one.leaf.data, one.part_of_weight())
                master = {MASTER: one.leaf.data} if one.on_master else {}
                exported[one.weight.name] = {**master, **piece.instance.optimizer.state.get(one.leaf, {})}
        return {weight.name: exported[weight.name] for weight in self.weights if exported.get(weight.name)}

    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        """Replace all state by a copy of the results of `export` and `own_hyperparameters`."""
        self.discard()
        self._restored, self._restored_own = {name: dict(values) for name, values in state.items()}, own

    def discard(self) -> None:
        """Forget all state."""
        self._pieces = []
        self._restored, self._restored_own = {}, {}

    def own_hyperparameters(self) -> OwnHyperparameters:
        """Return the hyperparameters that the base optimizer's instances adapted by themselves, if there are any.

        Raises:
            RuntimeError: If the chunks of one group adapted differently, which no element-wise optimizer does.
        """
        common: dict[int, dict[str, Any]] = {}
        instances = [piece.instance for piece in self._pieces if piece.instance is not None]
        for instance in instances:
            for index, values in instance.adapted().items():
                known = common.setdefault(index, values)
                if known.keys() != values.keys() or any(differs(known[key], values[key]) for key in known):
                    raise RuntimeError(
                        f"the chunks of one group changed {sorted(known | values)} differently, so "
                        f"{self._meter.base.name} is not element-wise. Set elementwise=False"
                    )
        # Restored hyperparameters count until all chunks have got them.
        return common or (self._restored_own if len(instances) < max(1, len(self._pieces)) else {})

    def _build(self, piece: Piece, param_groups: ParamGroups) -> Instance:
        for one in piece.slices:
            if one.on_master:
                weight = one.weight
                source = self._restored.get(weight.name, {}).get(MASTER, weight.parameter.data)
                master = source.to(device=weight.parameter.device, dtype=torch.float32, copy=True)
                claim(master, "state")
                one.place_leaf(master)
        instance = piece.build(self._meter.base, param_groups, self._restored_own)
        for one in piece.slices:
            if state := self._on_device(one):
                instance.optimizer.state[one.leaf] = state
            self._restored.pop(one.weight.name, None)
        return instance

    def _on_device(self, one: Slice) -> WeightState:
        """Copy the state that was restored for a slice, tensors with dimensions to its weight's device."""
        state: WeightState = {}
        for key, value in flatten_state(self._restored.get(one.weight.name, {}), copy_objects=True).items():
            if isinstance(value, torch.Tensor):
                with_weight = value.dim() or key in one.scalars_on_device
                value = value.to(one.weight.parameter.device if with_weight else "cpu", copy=True)
            state[key] = value
        state.pop(MASTER, None)
        return unflatten_state(state)


def adapted_hyperparameters(groups: Sequence[ResidentGroup]) -> dict[int, OwnHyperparameters]:
    """Return hyperparameters that the base optimizer's instances adapted by themselves, by index of the group.

    Args:
        groups: Owners of all groups' state, by index.
    """
    adapted = {index: each.own_hyperparameters() for index, each in enumerate(groups)}
    return {index: dict(own) for index, own in adapted.items() if own}


@torch.no_grad()
def restore_state(
    groups: Sequence[ResidentGroup], state: Mapping[str, WeightState], own: Mapping[int, OwnHyperparameters]
) -> None:
    """Replace all state by a copy of the exported state, and set weights to their masters, rounded.

    Args:
        groups: Owners of all groups' state, by index.
        state: State by name of the weight.
        own: Result of `adapted_hyperparameters`.
    """
    for index, group in enumerate(groups):
        # Weights first: the state may be a view of the files that are written next.
        for weight in group.weights:
            if MASTER in state.get(weight.name, {}) and not weight.is_waiting:
                weight.parameter.copy_(state[weight.name][MASTER])
        group.restore({w.name: state[w.name] for w in group.weights if w.name in state}, own.get(index, {}))
