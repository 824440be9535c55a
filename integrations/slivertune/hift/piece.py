"""Slices of weights that one instance of the base optimizer steps together."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from slivertune.core.hyperparameters import differs, in_form_of, own_copy
from slivertune.core.torch_internals import with_recompile_limit
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.offloaded_gradient import OffloadedGradient, norm_of
from slivertune.hift.rotation import LearningRate
from slivertune.hift.stochastic_rounding import StochasticRounding
from slivertune.hift.tiled_steps import FactoredRule, step_in_tiles, unmet

ParamGroups = Sequence[dict[str, Any]]
"""Param groups of the user's optimizer."""

OwnHyperparameters = Mapping[int, dict[str, Any]]
"""Hyperparameters that the base optimizer's instances changed by themselves, by index of the param group."""


RECOMPILE_LIMIT = 8
"""Compilations of a step, in addition to two per instance of the base optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of the model that a group trains."""

    name: str
    parameter: torch.nn.Parameter
    """Parameter that is stepped."""
    trained: torch.nn.Parameter
    """Parameter of the model, which is frozen and unfrozen. It is `parameter` unless that is sharded."""
    param_group: int
    """Index of the param group that holds its hyperparameters."""
    home: torch.device | None = None
    """Device on which it is stepped, if it is offloaded between its turns."""

    @property
    def device(self) -> torch.device:
        """Device on which it is stepped."""
        return self.parameter.device if self.home is None else self.home

    @property
    def first_element(self) -> int:
        """Index of `parameter`'s first element in the flattened whole weight, which may be sharded."""
        return 0

    @property
    def is_waiting(self) -> bool:
        """Whether `parameter` holds one NaN in the weight's form, because the weight is quantised."""
        return self.parameter.dim() > 0 and not any(self.parameter.stride())

    def take_gradient(self) -> None:
        """Give `parameter` the content and the gradient of `trained`, if these are two tensors."""


def drop_gradient(weight: Weight) -> None:
    """Drop the gradient of a stepped weight, and release its host memory."""
    if isinstance(weight.parameter.grad, OffloadedGradient):
        weight.parameter.grad.close()
    weight.parameter.grad = None


class Slice:
    """Elements [start, stop) of a weight, and the leaf tensor that the base optimizer steps in their place.

    The leaf is the weight itself if the slice is whole and stepped in its own dtype. Else it is a placeholder, set in
    every step.

    Args:
        weight: Weight of the slice.
        start: First element of the flattened weight.
        stop: One past the last element.
        in_fp32: Whether the base optimizer steps an fp32 copy of a 16-bit weight.
        on_master: Whether that copy is a master, which lasts. Others are made for one step, and rounded stochastically.
        rule: Rule by which the whole weight is stepped in tiles, None if the base optimizer steps the slice at once.
        scalars_on_device: Keys of state without dimensions that is on the weight's device in a step, not on the host.
    """

    def __init__(
        self,
        weight: Weight,
        start: int,
        stop: int,
        *,
        in_fp32: bool,
        on_master: bool,
        rule: FactoredRule | None,
        scalars_on_device: frozenset[str],
    ) -> None:
        self.weight = weight
        self.start = start
        self.stop = stop
        self.on_master = on_master
        self.rule = rule
        self.is_rounded = in_fp32 and not on_master
        self.scalars_on_device = scalars_on_device
        self.is_whole = stop - start == weight.parameter.numel()
        self.is_weight = self.is_whole and not in_fp32
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        self.leaf = weight.parameter if self.is_weight else torch.nn.Parameter(empty)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this slice's part of a tensor of the weight's shape: in that shape if whole, else in one dimension."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]

    def part_of_weight(self) -> torch.Tensor:
        """Return this slice's part of the weight's data."""
        return self.part_of(self.weight.parameter.data)

    def place_leaf(self, data: torch.Tensor) -> None:
        """Point the leaf to `data`: the weight's part, its fp32 copy, or an empty tensor to release the old data."""
        if not self.is_weight:
            self.leaf.grad = None
            self.leaf.data = data

    def write_weight(self, rounding: StochasticRounding | None) -> None:
        """Write the stepped copy to this slice's part of the weight, if there is a copy.

        Args:
            rounding: Rounding of the update, for copies that are no masters; None if there are none.
        """
        if self.on_master:
            self.part_of_weight().copy_(self.leaf.data)
        elif self.is_rounded:
            assert rounding is not None
            start = self.weight.first_element + self.start
            rounding.of(self.weight.name).round_into(self.part_of_weight(), self.leaf.data, start)

    def attach_gradient(self, part: torch.Tensor | None = None) -> None:
        """Give the leaf its part of the weight's gradient, in the leaf's dtype.

        Args:
            part: Loaded part, in the slice's shape, if the weight's gradient is on the host.
        """
        gradient = self.weight.parameter.grad
        if part is None and isinstance(gradient, OffloadedGradient):
            part = gradient.copy_on_device(self.start, None if self.is_whole else self.stop)
            gradient.part_norms.append(norm_of(part))
        if part is not None:
            if self.is_weight:
                drop_gradient(self.weight)  # replaced by the part
            self.leaf.grad = part.to(self.leaf.dtype)
            return
        if self.is_weight or gradient is None:
            return
        if gradient.is_sparse:
            raise ValueError(
                f"{self.weight.name} has a sparse gradient, which can't be cut or cast to fp32. "
                "Set sparse=False on its embedding, or train fp32 weights with stream_bytes=0"
            )
        part = gradient if self.is_whole else gradient.reshape(-1)[self.start : self.stop]
        self.leaf.grad = part.to(self.leaf.dtype)

    def drop_gradient(self, *, is_last: bool) -> None:
        """Drop the leaf's gradient, and the weight's if this is the last of its slices to be stepped."""
        self.leaf.grad = None
        if is_last:
            drop_gradient(self.weight)


PARAM_GROUP = "slivertune_param_group"
"""Key, in an instance's param group, of the index of HiFT's param group that holds its hyperparameters."""


class Instance:
    """An instance of the base optimizer that follows the user's param groups, except for its own adaptations.

    A hyperparameter that the schedule did not change keeps the instance's value: some optimizers adapt their own.

    Args:
        optimizer: The instance.
        indices: For each of its param groups, the index of the user's group that holds the hyperparameters. With None,
            each group has its index under `PARAM_GROUP`, since an engine may step the groups one by one.
        in_tiles: Slices that are stepped in tiles. The others are stepped by the optimizer itself.
    """

    _num_made: ClassVar[int] = 0

    def __init__(
        self, optimizer: torch.optim.Optimizer, indices: Sequence[int] | None = None, in_tiles: Sequence[Slice] = ()
    ) -> None:
        Instance._num_made += 1
        self.optimizer = optimizer
        """Instance of the base optimizer's class."""
        self._indices = indices
        self._in_tiles = in_tiles
        self._pushed: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        """Values given last, by index of the user's group, which reveal the instance's own changes."""

    def push(self, param_groups: ParamGroups, learning_rates: Sequence[LearningRate]) -> None:
        """Give the instance the hyperparameters that have changed since the last call.

        Args:
            param_groups: Param groups of the user.
            learning_rates: Learning rates to apply in place of theirs.
        """
        for inner, index in self._param_groups():
            pushed = self._pushed[index]
            for key, value in {**param_groups[index], "lr": learning_rates[index]}.items():
                if key != "params" and (key not in pushed or differs(pushed[key], value)):
                    inner[key] = in_form_of(inner.get(key), own_copy(value))
                    pushed[key] = own_copy(value)

    def step(self, rounding: StochasticRounding | None = None) -> None:
        """Step. A class with a compiled step compiles it for each instance and each size of a chunk.

        If each step needs a new compilation, as in torch's own optimizers whose state moves, torch stops at its limit.

        Args:
            rounding: Rounding of the update, if bf16 weights that are stepped in tiles are rounded stochastically.
        """
        tiled = [
            (one, gradient, self._group_of(one))
            for one in self._in_tiles
            if (gradient := one.leaf.grad) is not None and not gradient.is_sparse  # which the optimizer refuses
        ]
        try:
            for one, _, _ in tiled:
                one.leaf.grad = None
            with with_recompile_limit(RECOMPILE_LIMIT + 2 * Instance._num_made):
                self.optimizer.step()
            for one, gradient, group in tiled:
                self._step_in_tiles(one, gradient, group, rounding)
        finally:
            for one, gradient, _ in tiled:
                one.leaf.grad = gradient

    def _group_of(self, one: Slice) -> dict[str, Any]:
        return next(inner for inner, index in self._param_groups() if index == one.weight.param_group)

    def _step_in_tiles(
        self, one: Slice, gradient: torch.Tensor, group: dict[str, Any], rounding: StochasticRounding | None
    ) -> None:
        assert one.rule is not None
        is_rounded = one.leaf.dtype == torch.bfloat16
        of_weight = rounding.of(one.weight.name) if rounding is not None and is_rounded else None
        step_in_tiles(one.rule, self.optimizer.state[one.leaf], group, one.leaf.data, gradient, of_weight)

    def adapted(self) -> dict[int, dict[str, Any]]:
        """Return hyperparameters that the instance changed itself (as adaptive step sizes), by index of the group."""
        adapted = {}
        for inner, index in self._param_groups():
            pushed = self._pushed[index]
            own = {key: own_copy(inner[key]) for key in pushed if key in inner and differs(pushed[key], inner[key])}
            if own:
                adapted[index] = own
        return adapted

    def restore(self, param_groups: ParamGroups, own: OwnHyperparameters) -> None:
        """Restore the hyperparameters that `adapted` returned.

        Args:
            param_groups: Param groups of the user.
            own: Hyperparameters that the instance had changed.
        """
        for inner, index in self._param_groups():
            inner.update(own.get(index, {}))
            self._pushed[index] = {key: own_copy(param_groups[index][key]) for key in own.get(index, {})}

    def _param_groups(self) -> Iterator[tuple[dict[str, Any], int]]:
        groups = self.optimizer.param_groups
        indices = [inner[PARAM_GROUP] for inner in groups] if self._indices is None else self._indices
        return zip(groups, indices, strict=True)


class Piece:
    """A chunk: slices, and the instance of the base optimizer that steps them and lives as long as the chunk.

    Args:
        slices: Slices to step, in the order of the model's parameters.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices
        self.instance: Instance | None = None
        """Instance, built when the leaves first have their data: some constructors create their state at once."""

    def build(self, base: BaseOptimizer, param_groups: ParamGroups, own: OwnHyperparameters) -> Instance:
        """Build the instance.

        Args:
            base: The base optimizer.
            param_groups: Param groups of the user.
            own: Hyperparameters that an earlier instance in its place had changed; empty for none.
        """
        indices = sorted({one.weight.param_group for one in self.slices})
        groups = [
            {
                **{key: value for key, value in param_groups[index].items() if key != "params"},
                "params": [one.leaf for one in self.slices if one.weight.param_group == index],
            }
            for index in indices
        ]
        leaves = [(one.leaf, one.weight.parameter) for one in self.slices]
        in_tiles = [one for one in self.slices if one.rule is not None]
        self.instance = Instance(base.build(groups, leaves), indices, in_tiles)
        self.instance.restore(param_groups, own)
        return self.instance


def check_rules(pieces: Sequence[Piece], param_groups: ParamGroups) -> None:
    """Check that the rules of slices that are stepped in tiles still hold for the hyperparameters.

    Args:
        pieces: Chunks of a group.
        param_groups: Param groups of the optimizer.

    Raises:
        ValueError: If a hyperparameter has changed for which a rule does not hold, with its name.
    """
    for one in itertools.chain.from_iterable(piece.slices for piece in pieces):
        group = param_groups[one.weight.param_group]
        if one.rule is not None and (name := unmet(one.rule, group)) is not None:
            raise ValueError(
                f"{name}={group[name]!r} was set after the first step, and {one.weight.name} is stepped in tiles, "
                f"which needs {name}={one.rule.settings.get(name, 'a number')!r}. Set it when HiFT is built"
            )
