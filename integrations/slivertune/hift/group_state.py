"""Owners of a group's masters and optimizer state: the contract, and the owner whose state stays on the device."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.hyperparameters import differs
from slivertune.core.ledger import claim
from slivertune.hift.chunk import (
    MASTER,
    Chunk,
    OwnHyperparameters,
    ParamGroups,
    Weight,
    drop_gradient,
    refresh_master,
)
from slivertune.hift.cutting import cut_group
from slivertune.hift.nested_state import flatten_state, unflatten_state
from slivertune.hift.probe import StepMeter
from slivertune.hift.rotation import LearningRate
from slivertune.hift.stochastic_rounding import StochasticRounding, rounding_of
from slivertune.hift.tiled_steps import unmet

WeightState = dict[str, Any]
"""State of one weight by key, tensors in the weight's own extent. `MASTER` is its fp32 master, if it has one."""


class GroupState(ABC):
    """Owner of one group's masters and optimizer state, on the device or off it between the group's turns."""

    weights: tuple[Weight, ...]
    """Trained weights of the group."""
    chunks: list[Chunk]
    """Chunks in the order of their steps, each with an instance of the base optimizer. None before the first use."""
    restored_own: OwnHyperparameters
    """Restored hyperparameters for the instances of chunks to come."""

    @property
    @abstractmethod
    def is_offloaded(self) -> bool:
        """Whether there is state, and it is stored off the device."""

    @abstractmethod
    def prefetch(self, *, in_backward: bool = False) -> None:
        """Begin to load the first chunks to the device. May be called repeatedly from the beginning of the turn on.

        Args:
            in_backward: Whether a gradient of the group has arrived. The working chunks are then loaded in any case.
        """

    @abstractmethod
    def load_gradients(self) -> None:
        """Begin to load offloaded gradients: only a running backward may still add to them."""

    @abstractmethod
    def release(self, to_bytes: int | None = None) -> None:
        """Evict loaded chunks, so that at most `to_bytes` bytes stay allocated on the device for chunks to come.

        Args:
            to_bytes: Bytes that stay allocated; None for those that the setting allows.
        """

    @abstractmethod
    def begin(self, *, stays: bool, update: int) -> None:
        """Prepare an update, before its first call of `step`.

        Args:
            stays: Whether the next update is this group's, too.
            update: Number of updates before this one.

        Raises:
            OSError: If the state has no room. After any error here, nothing was stepped.
            ValueError: If a hyperparameter has changed for which the rule of steps in tiles does not hold.
        """

    @abstractmethod
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        """Step weights from their gradients, and drop the gradients.

        Args:
            weights: The whole group, or one of its weights if stepped gradients step each alone.
            param_groups: Param groups of the optimizer.
            held_lr: Learning rates to apply, one per param group.
        """

    @abstractmethod
    def end(self) -> None:
        """Release everything that is kept on the device from one `step` of an update to the next."""

    @abstractmethod
    def export(self, *, lasts: bool = True) -> dict[str, WeightState]:
        """Return the state of every weight that has some, by name. Tensors are not copied if they need not be.

        Args:
            lasts: Whether they are read after another group's were requested. If not, `state="disk"` saves a read.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        """Replace all state by a copy of the results of `export` and `adapted_by_instances`."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all state."""


class ResidentState(GroupState):
    """Masters and state that never leave the device (`state="device"`).

    One instance of the base optimizer steps the whole group. With stepped gradients or stochastic rounding, each weight
    has its own.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
    """

    def __init__(self, weights: Sequence[Weight], meter: StepMeter) -> None:
        self.weights, self.chunks, self.restored_own = tuple(weights), [], {}
        self._meter = meter
        self._restored: dict[str, WeightState] = {}
        self._rounding: StochasticRounding | None = None
        """Rounding of the current update, if weights have fp32 copies that are no masters."""

    is_offloaded = False

    @override
    def prefetch(self, *, in_backward: bool = False) -> None: ...

    @override
    def load_gradients(self) -> None: ...

    @override
    def release(self, to_bytes: int | None = None) -> None: ...

    @override
    def begin(self, *, stays: bool, update: int) -> None:
        self._rounding = rounding_of(self._meter.config, update)
        self.chunks = self.chunks or cut_group(self.weights, self._meter, self.restored_own)
        check_rules(self.chunks, self._meter.param_groups)

    @override
    def step(self, weights: Sequence[Weight], param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        for chunk in chunks_of(self.chunks, weights):
            self._step_chunk(chunk, param_groups, held_lr)

    @override
    def end(self) -> None: ...

    @override
    def export(self, *, lasts: bool = True) -> dict[str, WeightState]:
        exported = {name: dict(state) for name, state in self._restored.items()}
        for weight in self.weights:
            if MASTER in exported.get(weight.name, {}):
                arrived = exported[weight.name][MASTER].clone()
                exported[weight.name][MASTER] = refresh_master(arrived, weight.parameter.detach().to(arrived.device))
        for chunk in self.chunks:
            if chunk.optimizer is None:
                continue
            for one in chunk.slices:
                if one.on_master:
                    refresh_master(one.leaf.data, one.part_of_weight())
                master = {MASTER: one.leaf.data} if one.on_master else {}
                exported[one.weight.name] = {**master, **chunk.optimizer.state.get(one.leaf, {})}
        return {weight.name: exported[weight.name] for weight in self.weights if exported.get(weight.name)}

    @override
    def restore(self, state: Mapping[str, WeightState], own: OwnHyperparameters) -> None:
        self.discard()
        self._restored, self.restored_own = {name: dict(values) for name, values in state.items()}, own

    @override
    def discard(self) -> None:
        self.chunks, self.restored_own = [], {}
        self._restored = {}

    def forget_moments(self) -> None:
        """Forget all state, but keep the chunks, so that the next step begins it again."""
        for chunk in self.chunks:
            if chunk.optimizer is not None:
                chunk.optimizer.state.clear()

    def _step_chunk(self, chunk: Chunk, param_groups: ParamGroups, held_lr: Sequence[LearningRate]) -> None:
        rounded = [one for one in chunk.slices if one.is_rounded]
        try:
            for one in rounded:
                one.place_leaf(one.part_of_weight().to(torch.float32))
            optimizer = chunk.optimizer or self._build(chunk, param_groups)
            for one in chunk.slices:
                if one.on_master:
                    refresh_master(one.leaf.data, one.part_of_weight())
                one.attach_gradient()
            chunk.step(optimizer, param_groups, held_lr, self._rounding)
            for one in chunk.slices:
                one.write_weight(self._rounding)
                one.leaf.grad = None
                if one.stop == one.weight.parameter.numel():
                    drop_gradient(one.weight)
                for value in flatten_state(optimizer.state.get(one.leaf, {})).values():
                    if isinstance(value, torch.Tensor):
                        claim(value, "state")
        finally:
            for one in rounded:
                one.place_leaf(torch.empty(0, dtype=one.leaf.dtype, device="cpu"))

    def _build(self, chunk: Chunk, param_groups: ParamGroups) -> torch.optim.Optimizer:
        """Build a chunk's instance over its masters, and copy its restored state to the device of its weights."""
        for one in chunk.slices:
            if one.on_master:
                parameter = one.weight.parameter
                source = self._restored.get(one.weight.name, {}).get(MASTER, parameter.data)
                master = source.to(device=parameter.device, dtype=torch.float32, copy=True)
                claim(master, "state")
                one.place_leaf(master)
        optimizer = chunk.build(param_groups)
        for one in chunk.slices:
            state = flatten_state(self._restored.get(one.weight.name, {}), copy_objects=True)
            state.pop(MASTER, None)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    device = one.weight.parameter.device if one.is_on_device(key, value) else "cpu"
                    state[key] = value.to(device, copy=True)
            if state:
                optimizer.state[one.leaf] = unflatten_state(state)
            self._restored.pop(one.weight.name, None)
        return optimizer


def chunks_of(chunks: Sequence[Chunk], weights: Sequence[Weight]) -> list[Chunk]:
    """Return the chunks that begin with one of these weights."""
    names = {weight.name for weight in weights}
    return [chunk for chunk in chunks if chunk.slices[0].weight.name in names]


def check_rules(chunks: Sequence[Chunk], param_groups: ParamGroups) -> None:
    """Check that the rules of slices that are stepped in tiles still hold for the hyperparameters.

    Raises:
        ValueError: If a hyperparameter has changed for which a rule does not hold, with its name.
    """
    for chunk in chunks:
        for one in chunk.slices:
            group = param_groups[one.weight.param_group]
            if one.rule is not None and (name := unmet(one.rule, group)) is not None:
                raise ValueError(
                    f"{name}={group[name]!r} was set after the first step, and {one.weight.name} is stepped in tiles, "
                    f"which needs {name}={one.rule.settings.get(name, 'a number')!r}. Set it when HiFT is built"
                )


def adapted_by_instances(state: GroupState) -> OwnHyperparameters:
    """Return the hyperparameters that a group's instances of the base optimizer adapted themselves, if there are any.

    Raises:
        RuntimeError: If the chunks of one group adapted differently, which no element-wise optimizer does.
    """
    common: dict[int, dict[str, Any]] = {}
    adapted = [own for chunk in state.chunks if (own := chunk.adapted()) is not None]
    for index, values in itertools.chain.from_iterable(own.items() for own in adapted):
        known = common.setdefault(index, values)
        if known.keys() != values.keys() or any(differs(known[key], values[key]) for key in known):
            raise RuntimeError(
                f"the chunks of one group changed {sorted(known | values)} differently, so {state.chunks[0].base.name} "
                "is not element-wise. Set elementwise=False"
            )
    # Restored hyperparameters count until all chunks have got them.
    return common or (state.restored_own if len(adapted) < max(1, len(state.chunks)) else {})


def adapted_hyperparameters(states: Sequence[GroupState]) -> dict[int, OwnHyperparameters]:
    """Return the own hyperparameters of all groups that have some, by index of the group."""
    adapted = {index: adapted_by_instances(state) for index, state in enumerate(states)}
    return {index: dict(own) for index, own in adapted.items() if own}


@torch.no_grad()
def restore_state(
    groups: Sequence[GroupState], state: Mapping[str, WeightState], own: Mapping[int, OwnHyperparameters]
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
            if MASTER in state.get(weight.name, {}) and not weight.is_quantized:
                weight.parameter.copy_(state[weight.name][MASTER])
        group.restore({w.name: state[w.name] for w in group.weights if w.name in state}, own.get(index, {}))
