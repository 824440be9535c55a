"""Slices of weights that one instance of the base optimizer steps together."""

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

ParamGroups = Sequence[dict[str, Any]]
"""The param groups of the optimizer that the user holds."""

OwnHyperparameters = Mapping[int, dict[str, Any]]
"""What the base optimizer's instances changed in their param groups by themselves, by index of the param group."""


RECOMPILE_LIMIT = 8
"""Compilations of a step, beside two for each instance of the base optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of the model that a group trains."""

    name: str
    parameter: torch.nn.Parameter
    """What is stepped."""
    trained: torch.nn.Parameter
    """The model's own parameter, which is frozen and unfrozen; `parameter` where that is not sharded."""
    param_group: int
    """Index of the param group that holds its hyperparameters."""
    home: torch.device | None = None
    """Where it is stepped, if it waits elsewhere between its turns."""

    @property
    def device(self) -> torch.device:
        """Where it is stepped."""
        return self.parameter.device if self.home is None else self.home

    @property
    def is_waiting(self) -> bool:
        """Whether `parameter` holds one NaN in the weight's form, since the weight waits in fewer bits."""
        return self.parameter.dim() > 0 and not any(self.parameter.stride())

    def take_gradient(self) -> None:
        """Let `parameter` hold what `trained` does, its gradient included; asked for where it is another tensor."""


def drop_gradient(weight: Weight) -> None:
    """Drop a weight's gradient that was stepped, also what is known of it elsewhere."""
    if isinstance(weight.parameter.grad, OffloadedGradient):
        weight.parameter.grad.close()
    weight.parameter.grad = None


class Slice:
    """Elements [start, stop) of a weight, and the leaf tensor that the base optimizer steps in their place.

    The leaf is the weight itself where it is whole and has no master; else a placeholder, placed again in every step.

    Args:
        weight: The weight.
        start: First element, of the flattened weight.
        stop: One past the last.
        on_master: Whether the base optimizer steps an fp32 master.
        scalars_on_device: Keys of state without dimensions that lies beside the weight in a step, and not on the host.
    """

    def __init__(
        self, weight: Weight, start: int, stop: int, *, on_master: bool, scalars_on_device: frozenset[str]
    ) -> None:
        self.weight = weight
        self.start = start
        self.stop = stop
        self.on_master = on_master
        self.scalars_on_device = scalars_on_device
        self.is_whole = stop - start == weight.parameter.numel()
        self.is_weight = self.is_whole and not on_master
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        self.leaf = weight.parameter if self.is_weight else torch.nn.Parameter(empty)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This slice's part of a tensor of the weight's shape: in that shape if whole, else in one dimension."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]

    def part_of_weight(self) -> torch.Tensor:
        """This slice's part of the weight's data."""
        return self.part_of(self.weight.parameter.data)

    def place_leaf(self, data: torch.Tensor) -> None:
        """Put the leaf on `data`: the part of the weight, or its master; or on nothing, to let go of what it lay on."""
        if not self.is_weight:
            self.leaf.grad = None
            self.leaf.data = data

    def attach_gradient(self, part: torch.Tensor | None = None) -> None:
        """Give the leaf its part of the weight's gradient, in the leaf's dtype.

        Args:
            part: The part, where the weight's gradient lies on the host and this was loaded; of the slice's shape.
        """
        gradient = self.weight.parameter.grad
        if part is None and isinstance(gradient, OffloadedGradient):
            part = gradient.copy_on_device(self.start, None if self.is_whole else self.stop)
            gradient.part_norms.append(norm_of(part))
        if part is not None:
            if self.is_weight:
                drop_gradient(self.weight)  # in whose place it comes
            self.leaf.grad = part.to(self.leaf.dtype)
            return
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
            drop_gradient(self.weight)


PARAM_GROUP = "slivertune_param_group"
"""Key in an instance's param group: the index of HiFT's param group that holds its hyperparameters."""


class Instance:
    """An instance of the base optimizer, which follows the user's param groups but for what it adapts by itself.

    What the schedule did not touch stays in the instance: some optimizers adapt their own hyperparameters.

    Args:
        optimizer: The instance.
        indices: For each of its param groups, the index of the user's that holds the hyperparameters; None where each
            tells it under `PARAM_GROUP`, since an engine may step them one by one.
    """

    _num_made: ClassVar[int] = 0

    def __init__(self, optimizer: torch.optim.Optimizer, indices: Sequence[int] | None = None) -> None:
        Instance._num_made += 1
        self.optimizer = optimizer
        """The instance itself."""
        self._indices = indices
        self._pushed: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        """What was given last, by index of the user's, so that what the instance changes by itself can be told."""

    def push(self, param_groups: ParamGroups, learning_rates: Sequence[LearningRate]) -> None:
        """Give the instance what has changed since the last time.

        Args:
            param_groups: The user's.
            learning_rates: What is applied in place of theirs.
        """
        for inner, index in self._param_groups():
            pushed = self._pushed[index]
            for key, value in {**param_groups[index], "lr": learning_rates[index]}.items():
                if key != "params" and (key not in pushed or differs(pushed[key], value)):
                    inner[key] = in_form_of(inner.get(key), own_copy(value))
                    pushed[key] = own_copy(value)

    def step(self) -> None:
        """Step; a class whose step is compiled compiles it for each instance, and each size of a piece.

        Where each step is compiled anew, as torch does for its own optimizers whose state moves, torch gives up.
        """
        with with_recompile_limit(RECOMPILE_LIMIT + 2 * Instance._num_made):
            self.optimizer.step()

    def adapted(self) -> dict[int, dict[str, Any]]:
        """What the instance itself changed (adaptive step sizes and the like), by index of the user's param group."""
        adapted = {}
        for inner, index in self._param_groups():
            pushed = self._pushed[index]
            own = {key: own_copy(inner[key]) for key in pushed if key in inner and differs(pushed[key], inner[key])}
            if own:
                adapted[index] = own
        return adapted

    def restore(self, param_groups: ParamGroups, own: OwnHyperparameters) -> None:
        """Put back what `adapted` returned.

        Args:
            param_groups: The user's.
            own: What the instance had changed.
        """
        for inner, index in self._param_groups():
            inner.update(own.get(index, {}))
            self._pushed[index] = {key: own_copy(param_groups[index][key]) for key in own.get(index, {})}

    def _param_groups(self) -> Iterator[tuple[dict[str, Any], int]]:
        groups = self.optimizer.param_groups
        indices = [inner[PARAM_GROUP] for inner in groups] if self._indices is None else self._indices
        return zip(groups, indices, strict=True)


class Piece:
    """Slices and the instance of the base optimizer that steps them; the instance lives as long as the piece.

    Args:
        slices: What it steps, in the order of the model's parameters.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices
        self.instance: Instance | None = None
        """Made when the leaves first lie on their data: some constructors make their state at once."""

    def build(self, base: BaseOptimizer, param_groups: ParamGroups, own: OwnHyperparameters) -> Instance:
        """Make the instance.

        Args:
            base: The base optimizer.
            param_groups: The user's.
            own: What another instance in its place had changed; empty for none.
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
        self.instance = Instance(base.build(groups, leaves), indices)
        self.instance.restore(param_groups, own)
        return self.instance
