"""Steps of factored optimizers (Adafactor) in tiles of a weight, so that temporaries stay small.

A factored optimizer keeps one second moment per row and one per column of a matrix. Its step divides the gradient by
their root, and clips the root mean square of the result. The step takes three passes over the tiles: sums of squares by
row and column, the norm of the update, and the update itself. The whole step gives the same result, to rounding, with
temporaries of several times the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from slivertune.core.repeated_work import standing_for
from slivertune.core.torch_internals import FakeTensor

TILE_ELEMENTS = 2**22
"""Elements per tile. In fp32 they take 16 MiB, less than a quarter of the L2 cache of an RTX 4090 (72 MB)."""

TILE_BYTES = 4 * TILE_ELEMENTS
"""Bytes of a tile in fp32."""

_LARGEST = torch.finfo(torch.float32).max

Write = Callable[[torch.Tensor, torch.Tensor, int], object]
"""Function that writes fp32 values (the second argument) to a part of the weight whose first element has this index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Place of a tile: several whole matrices, or some rows of one."""

    matrices: slice
    rows: slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """Factors of the gradient by row and column, whose product with it is the update, and its size."""

    rows: torch.Tensor
    """Factor of each row. Shape (matrices, rows, 1)."""
    columns: torch.Tensor
    """Factor of each column, negative. Shape (matrices, 1, columns)."""
    least: torch.Tensor | None
    """Least product of two factors, negative, without dimensions. None if there is none."""
    rate: torch.Tensor | float
    """Learning rate before clipping."""
    threshold: float
    """Root mean square above which the update is scaled down to it."""
    decay: float
    """Factor of the weight."""

    def of(self, gradient: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Return the update of a tile before rate and clipping, a new fp32 tensor.

        Args:
            gradient: The tile of the gradient.
            tile: Its place.
        """
        rows, columns = self.rows[tile.matrices, tile.rows], self.columns[tile.matrices]
        if self.least is None:
            return torch.mul(gradient, rows).mul_(columns)
        return torch.mul(rows, columns).clamp_(min=self.least).mul_(gradient)

    def scaled(self, scale: torch.Tensor) -> Direction:
        """Return the direction multiplied by a number that is not negative."""
        return replace(self, columns=self.columns * scale, least=None if self.least is None else self.least * scale)


class FactoredRule(Protocol):
    """Rule of a factored optimizer class."""

    settings: ClassVar[Mapping[str, Any]]
    """Hyperparameters that the rule needs, with the values for which it holds."""
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16})
    """Dtypes of tensors whose whole step computes in fp32."""

    def begin(self, state: dict[str, Any], gradient: torch.Tensor) -> None:
        """Create the state of a weight, as the class's first step does.

        Args:
            state: Empty state of the weight.
            gradient: Its gradient.
        """

    def advance(
        self, state: dict[str, Any], group: Mapping[str, Any], squares: SquareMeans, weight: torch.Tensor
    ) -> Direction:
        """Update a weight's moments in place and return the direction of the update.

        Args:
            state: State of the weight.
            group: Hyperparameters.
            squares: Means of the gradient's squares.
            weight: The weight, with three dimensions.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SquareMeans:
    """Means of the squares of a gradient."""

    rows: torch.Tensor
    """Mean of each row. Shape (matrices, rows)."""
    columns: torch.Tensor
    """Mean of each column. Shape (matrices, columns)."""


class TransformersRule(FactoredRule):
    """`transformers.optimization.Adafactor` without momentum, relative steps and scaling by the weight's size."""

    settings = MappingProxyType({"scale_parameter": False, "relative_step": False, "beta1": None})

    @override
    def begin(self, state: dict[str, Any], gradient: torch.Tensor) -> None:
        """Create the state."""
        shape, zeros = gradient.shape, partial(gradient.new_zeros, dtype=torch.float32)
        state["step"] = 0
        state["exp_avg_sq_row"] = zeros(shape[:-1])
        state["exp_avg_sq_col"] = zeros((*shape[:-2], shape[-1]))
        state["RMS"] = zeros(())  # nothing reads it without scale_parameter

    @override
    def advance(
        self, state: dict[str, Any], group: Mapping[str, Any], squares: SquareMeans, weight: torch.Tensor
    ) -> Direction:
        """Update the moments."""
        state["step"] += 1
        fading = math.pow(state["step"], group["decay_rate"])
        least, rows, columns = group["eps"][0], state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        rows.mul_(1 - fading).add_(squares.rows.view_as(rows).add_(least), alpha=fading)
        columns.mul_(1 - fading).add_(squares.columns.view_as(columns).add_(least), alpha=fading)
        return Direction(
            rows=(rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().view(len(weight), -1, 1),
            columns=columns.rsqrt().neg_().view(len(weight), 1, -1),
            least=None,
            rate=float(group["lr"]),
            threshold=group["clip_threshold"],
            decay=1 - group["weight_decay"] * float(group["lr"]),
        )


class TorchRule(FactoredRule):
    """`torch.optim.Adafactor`, whose learning rate is multiplied by the weight's root mean square."""

    settings = MappingProxyType({"maximize": False})
    dtypes = frozenset({torch.float32})

    @override
    def begin(self, state: dict[str, Any], gradient: torch.Tensor) -> None:
        """Create the state."""
        shape, zeros = gradient.shape, partial(gradient.new_zeros, dtype=torch.float32)
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["row_var"] = zeros((*shape[:-1], 1))
        state["col_var"] = zeros((*shape[:-2], 1, shape[-1]))

    @override
    def advance(
        self, state: dict[str, Any], group: Mapping[str, Any], squares: SquareMeans, weight: torch.Tensor
    ) -> Direction:
        """Update the moments."""
        state["step"] += 1
        step, (least, least_size) = float(state["step"]), group["eps"]
        least = torch.finfo(torch.float32).eps if least is None else least
        rows, columns = state["row_var"], state["col_var"]
        rows.lerp_(squares.rows.view_as(rows), step ** group["beta2_decay"])
        columns.lerp_(squares.columns.view_as(columns), step ** group["beta2_decay"])
        size = _root_mean_square((part for _, part in _tiles(weight)), weight)
        row_factors = (rows / rows.mean(dim=-2, keepdim=True).clamp_(min=least)).rsqrt_()
        # Infinite factors of zero rows and columns would be NaN at a rate of 0. Their products are clamped anyway.
        return Direction(
            rows=row_factors.clamp_(max=_LARGEST).view(len(weight), -1, 1),
            columns=columns.rsqrt().clamp_(max=_LARGEST).neg_().view(len(weight), 1, -1),
            least=rows.new_full((), -1 / least if least else -_LARGEST),
            rate=size.clamp_(min=least_size).mul_(min(float(group["lr"]), 1 / math.sqrt(step))),
            threshold=group["d"],
            decay=1 - float(group["lr"]) * group["weight_decay"],
        )


_TRANSFORMERS = "transformers.optimization.Adafactor"


def rule_of(optimizer_class: type) -> FactoredRule | None:
    """Return the rule of an optimizer class, None if it is stepped whole.

    Args:
        optimizer_class: Class of the optimizer. A subclass has no rule.
    """
    if optimizer_class is torch.optim.Adafactor:
        return TorchRule()
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    return TransformersRule() if name == _TRANSFORMERS else None


def unmet(rule: FactoredRule, group: Mapping[str, Any]) -> str | None:
    """Return the first hyperparameter for which a rule does not hold, None if it holds for all.

    Args:
        rule: Rule of the optimizer.
        group: Hyperparameters.
    """
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        return "lr"
    return next((name for name, value in rule.settings.items() if group.get(name) != value), None)


def step_in_tiles(
    rule: FactoredRule,
    state: dict[str, Any],
    group: Mapping[str, Any],
    weight: torch.Tensor,
    gradient: torch.Tensor,
    write: Write,
) -> None:
    """Step a weight of two or more dimensions.

    Args:
        rule: Rule of the optimizer.
        state: State of the weight, updated in place; empty before its first step.
        group: Hyperparameters.
        weight: Contiguous weight in fp32 or bf16.
        gradient: Its gradient, in fp32 or bf16.
        write: Function that writes new values to a tile of the weight.
    """
    if not state:
        rule.begin(state, gradient)
    matrices, gradients = _matrices(weight), _matrices(gradient)
    direction = rule.advance(state, group, _square_means(gradients), matrices)
    updates = (direction.of(part, tile) for tile, part in _tiles(gradients))
    excess = _root_mean_square(updates, gradients).div_(direction.threshold).clamp_(min=1.0)
    direction = direction.scaled(direction.rate / excess)
    for tile, part in _tiles(gradients):
        values, target = direction.of(part, tile), matrices[tile.matrices, tile.rows]
        values.add_(target, alpha=direction.decay)
        write(target, values, (tile.matrices.start * matrices.shape[1] + tile.rows.start) * matrices.shape[2])


def _matrices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


def _tiles(matrices: torch.Tensor) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Yield the tiles of a tensor of matrices, and the place of each.

    Fake tensors yield one tile of each shape, which stands for all of them.
    """
    num_matrices, num_rows, num_columns = matrices.shape
    num_at_once = max(1, TILE_ELEMENTS // (num_rows * num_columns))
    step = num_rows if num_at_once > 1 else max(1, TILE_ELEMENTS // num_columns)
    tiles = [
        Tile(matrices=some, rows=rows) for some in _parts(num_matrices, num_at_once) for rows in _parts(num_rows, step)
    ]
    if isinstance(matrices, FakeTensor):
        shapes = [(each.matrices.stop - each.matrices.start, each.rows.stop - each.rows.start) for each in tiles]
        for shape, tile in dict(zip(shapes, tiles, strict=True)).items():
            with standing_for(shapes.count(shape)):
                yield tile, matrices[tile.matrices, tile.rows]
        return
    for tile in tiles:
        yield tile, matrices[tile.matrices, tile.rows]


def _parts(whole: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, whole)) for start in range(0, whole, size)]


def _square_means(gradients: torch.Tensor) -> SquareMeans:
    num_matrices, num_rows, num_columns = gradients.shape
    row_norms = gradients.new_empty(num_matrices, num_rows, dtype=torch.float32)
    column_sums = gradients.new_zeros(num_matrices, num_columns, dtype=torch.float32)
    for tile, part in _tiles(gradients):
        values = part.to(torch.float32, copy=True)  # so that the gradient is read once
        torch.linalg.vector_norm(values, dim=2, out=row_norms[tile.matrices, tile.rows])
        norms = torch.linalg.vector_norm(values, dim=1)
        column_sums[tile.matrices].addcmul_(norms, norms)
    return SquareMeans(rows=row_norms.square_().div_(num_columns), columns=column_sums.div_(num_rows))


def _root_mean_square(parts: Iterator[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of a tensor's parts, without dimensions and on its device."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm.div_(math.sqrt(whole.numel()))
