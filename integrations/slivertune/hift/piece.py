"""Slices of weights that one instance of the base optimizer steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slivertune.core.hyperparameters import PushedHyperparameters
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.rotation import LearningRate


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of the model that a group trains."""

    name: str
    parameter: torch.nn.Parameter
    param_group: int
    """Index of the param group that holds its hyperparameters."""

    @property
    def has_master(self) -> bool:
        """Whether it is stored in 16 bits, so that an fp32 master can stand behind it."""
        return self.parameter.dtype == torch.bfloat16

    @property
    def trained(self) -> torch.nn.Parameter:
        """The model's own parameter, which is frozen and unfrozen; `parameter` where that is not sharded."""
        return self.parameter

    def take_gradient(self) -> bool:
        """Let `parameter` hold what `trained` does, its gradient included; whether there is one."""
        return self.parameter.grad is not None


class Slice:
    """Elements [start, stop) of a weight, and the leaf tensor that the base optimizer steps in their place.

    The leaf is the weight itself where it is whole and has no master; else a placeholder, placed again in every step.

    Args:
        weight: The weight.
        start: First element, of the flattened weight.
        stop: One past the last.
        on_master: Whether the base optimizer steps an fp32 master.
    """

    def __init__(self, weight: Weight, start: int, stop: int, *, on_master: bool) -> None:
        self.weight = weight
        self.start = start
        self.stop = stop
        self.on_master = on_master
        self.is_whole = stop - start == weight.parameter.numel()
        self.is_weight = self.is_whole and not on_master
        self.leaf = weight.parameter if self.is_weight else torch.nn.Parameter(torch.empty(0))

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This slice's part of a tensor of the weight's shape: in that shape if whole, else in one dimension."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]

    def part_of_weight(self) -> torch.Tensor:
        """This slice's part of the weight's data."""
        return self.part_of(self.weight.parameter.data)

    def place_leaf(self, data: torch.Tensor) -> None:
        """Put the leaf on `data`: the part of the weight, or its master."""
        if not self.is_weight:
            self.leaf.grad = None
            self.leaf.data = data

    def attach_gradient(self) -> None:
        """Give the leaf its part of the weight's gradient, in the leaf's dtype."""
        gradient = self.weight.parameter.grad
        if self.is_weight or gradient is None:
            return
        if gradient.is_sparse:
            raise ValueError(
                f"{self.weight.name} has a sparse gradient, which can't be cut or cast to a master; "
                "set sparse=False on its embedding, or train fp32 weights with stream_bytes=0"
            )
        part = gradient if self.is_whole else gradient.reshape(-1)[self.start : self.stop]
        self.leaf.grad = part.to(self.leaf.dtype)

    def drop_gradient(self) -> None:
        """Drop the leaf's gradient, and the weight's once its last slice is stepped."""
        self.leaf.grad = None
        if self.stop == self.weight.parameter.numel():
            self.weight.parameter.grad = None

    def clear_leaf(self) -> None:
        """Let go of what the leaf lay on."""
        if not self.is_weight:
            self.leaf.data = torch.empty(0, dtype=self.leaf.dtype)


class Piece:
    """Slices and the instance of the base optimizer that steps them; the instance lives as long as the piece.

    Args:
        slices: What it steps, in the order of the model's parameters.
        base: Makes the instance.
    """

    def __init__(self, slices: Sequence[Slice], base: BaseOptimizer) -> None:
        self.slices = tuple(slices)
        self._base = base
        self._group_indices = sorted({one.weight.param_group for one in slices})
        self._pushed = [PushedHyperparameters() for _ in self._group_indices]
        self._optimizer: torch.optim.Optimizer | None = None

    def step(self, param_groups: Sequence[dict[str, Any]], held_lr: Sequence[LearningRate]) -> None:
        """Step the leaves with the param groups' hyperparameters and the held learning rate."""
        optimizer = self._instance(param_groups)
        for inner, pushed, index in zip(optimizer.param_groups, self._pushed, self._group_indices, strict=True):
            pushed.push(inner, param_groups[index], held_lr[index])
        optimizer.step()

    def state_of(self, one: Slice) -> dict[str, Any]:
        """The instance's state of a slice."""
        return self._optimizer.state.get(one.leaf, {}) if self._optimizer is not None else {}

    def take_state(self, one: Slice) -> dict[str, Any]:
        """The same, removed from the instance."""
        return self._optimizer.state.pop(one.leaf, {}) if self._optimizer is not None else {}

    def put_state(self, param_groups: Sequence[dict[str, Any]], one: Slice, state: dict[str, Any]) -> None:
        """Give the instance the state of a slice; an empty one leaves what the constructor made."""
        optimizer = self._instance(param_groups)
        if state:
            optimizer.state[one.leaf] = state

    def own_hyperparameters(self) -> dict[int, dict[str, Any]]:
        """What the instance itself changed (adaptive step sizes and the like), by index of the param group."""
        if self._optimizer is None:
            return {}
        own = {
            index: pushed.adapted(inner)
            for inner, pushed, index in zip(
                self._optimizer.param_groups, self._pushed, self._group_indices, strict=True
            )
        }
        return {index: values for index, values in own.items() if values}

    def restore_hyperparameters(
        self, param_groups: Sequence[dict[str, Any]], own: Mapping[int, dict[str, Any]]
    ) -> None:
        """Put back what `own_hyperparameters` returned."""
        optimizer = self._instance(param_groups)
        for inner, pushed, index in zip(optimizer.param_groups, self._pushed, self._group_indices, strict=True):
            pushed.restore(inner, param_groups[index], own.get(index, {}))

    def _instance(self, param_groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        # Built when the leaves first lie on their data: some constructors make their state at once.
        if self._optimizer is None:
            groups = [
                {
                    **{key: value for key, value in param_groups[index].items() if key != "params"},
                    "params": [one.leaf for one in self.slices if one.weight.param_group == index],
                }
                for index in self._group_indices
            ]
            self._optimizer = self._base.build(groups, [(one.leaf, one.weight.parameter) for one in self.slices])
        return self._optimizer
