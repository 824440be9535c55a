"""Steps of factored optimizers (Adafactor) in tiles of a weight, so that temporaries stay small.

A factored optimizer keeps one second moment per row and one per column of a matrix. Its step divides the gradient by
their root, and clips the root mean square of the result. The step takes three passes over the tiles: sums of squares by
row and column, the norm of the update, and the update itself. The whole step gives the same result, to rounding, with
temporaries of several times the weight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from typing_extensions import override

from slivertune.core.repeated_work import standing_for
from slivertune.core.torch_internals import FakeTensor
from slivertune.hift.stochastic_rounding import BYTES_PER_ELEMENT, WeightRounding

TILE_ELEMENTS = 2**22
"""Elements per tile. In fp32 they take 16 MiB, less than a quarter of the L2 cache of an RTX 4090 (72 MB)."""

_ROWS_MULTIPLE = 8
"""Multiple of the rows of a tile, so that each tile of a matrix begins at 16 bytes, as compiled kernels need."""

TILE_BYTES = 4 * TILE_ELEMENTS
"""Bytes of a tile in fp32."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Place of a tile: several whole matrices, or some rows of one."""

    matrices: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Number of matrices and of rows."""
        return self.matrices.stop - self.matrices.start, self.rows.stop - self.rows.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors of a gradient, or of a tile of it, whose product with it is the update."""

    rows: torch.Tensor
    """Factor of each row. Shape (matrices, rows, 1)."""
    columns: torch.Tensor
    """Factor of each column, negative. Shape (matrices, 1, columns)."""
    least: torch.Tensor | None
    """Least product of two factors, negative, without dimensions. None if there is none."""

    def of(self, tile: Tile) -> Factors:
        """Return the factors of a tile."""
        return replace(self, rows=self.rows[tile.matrices, tile.rows], columns=self.columns[tile.matrices])

    def scaled(self, scale: torch.Tensor) -> Factors:
        """Return the factors of the update multiplied by a number that is not negative."""
        return replace(self, columns=self.columns * scale, least=None if self.least is None else self.least * scale)

    def times(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the update, a new fp32 tensor."""
        if self.least is None:
            return torch.mul(gradient, self.rows).mul_(self.columns)
        return torch.mul(self.rows, self.columns).clamp_(min=self.least).mul_(gradient)


class TilePasses:
    """The three passes over a tile, each by several operators."""

    def stepping(self) -> AbstractContextManager[object]:
        """Surround the passes over a weight."""
        return nullcontext()

    @property
    def tile_elements(self) -> int:
        """Most elements per tile, if a row is no longer."""
        return TILE_ELEMENTS

    def temporary_bytes(self, *, is_rounded: bool) -> int:
        """Return the bytes of temporaries that a tile takes at most.

        Args:
            is_rounded: Whether new values are rounded stochastically.
        """
        return self.tile_elements * (4 + BYTES_PER_ELEMENT * is_rounded)

    def norms(self, gradient: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
        """Return the 2-norm of each column, shape (matrices, columns).

        Args:
            gradient: Tile of the gradient.
            of_rows: Tensor for the 2-norm of each row, shape (matrices, rows).
        """
        values = gradient.to(torch.float32, copy=True)  # so that the gradient is read once
        torch.linalg.vector_norm(values, dim=2, out=of_rows)
        of_columns: torch.Tensor = torch.linalg.vector_norm(values, dim=1)
        return of_columns

    def update_norms(self, gradient: torch.Tensor, factors: Factors) -> torch.Tensor:
        """Return the 2-norm of a tile's update, or of each of its parts, in fp32."""
        norm: torch.Tensor = torch.linalg.vector_norm(factors.times(gradient))
        return norm

    def weight_norms(self, matrices: torch.Tensor) -> list[torch.Tensor]:
        """Return the 2-norms of the parts of a weight with three dimensions, in fp32."""
        tiles = _tiles(matrices, self.tile_elements)
        return [torch.linalg.vector_norm(part, dtype=torch.float32) for _, part in tiles]

    def number(self, value: float, like: torch.Tensor) -> float | torch.Tensor:
        """Return a number in the form that `write` takes, for all tiles of a weight."""
        return value

    def write(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        factors: Factors,
        *,
        decay: Any,
        rounding: WeightRounding | None,
        start: int,
    ) -> None:
        """Add the update to a tile of the weight.

        Args:
            weight: Tile of the weight, in fp32 or bf16.
            gradient: Tile of the gradient.
            factors: Factors of the update.
            decay: Factor of the weight, made by `number`.
            rounding: Stochastic rounding of a bf16 weight; None rounds to the nearest value.
            start: Index of the tile's first element in the flattened weight.
        """
        values = factors.times(gradient).add_(weight, alpha=decay)
        if rounding is None:
            weight.copy_(values)
        else:
            rounding.round_into(weight, values, start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """Direction of a weight's update, and its size."""

    factors: Factors
    """Factors of the whole gradient."""
    rate: torch.Tensor | float
    """Learning rate before clipping."""
    threshold: float
    """Root mean square above which the update is scaled down to it."""
    decay: float
    """Factor of the weight."""


class FactoredRule(ABC):
    """Rule of a factored optimizer class.

    Args:
        passes: Passes by which it steps.
    """

    settings: ClassVar[Mapping[str, Any]]
    """Hyperparameters that the rule needs, with the values for which it holds."""
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16})
    """Dtypes of tensors whose whole step computes in fp32."""

    def __init__(self, passes: TilePasses) -> None:
        self.passes = passes

    @abstractmethod
    def begin(self, state: dict[str, Any], gradient: torch.Tensor) -> None:
        """Create the state of a weight, as the class's first step does.

        Args:
            state: Empty state of the weight.
            gradient: Its gradient.
        """

    @abstractmethod
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
            factors=Factors(
                rows=(rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().view(len(weight), -1, 1),
                columns=columns.rsqrt().neg_().view(len(weight), 1, -1),
                least=None,
            ),
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
        size = _root_mean_square(self.passes.weight_norms(weight), weight)
        row_factors = (rows / rows.mean(dim=-2, keepdim=True).clamp_(min=least)).rsqrt_()
        # Infinite factors of zero rows and columns would be NaN at a rate of 0. Their products are clamped anyway.
        return Direction(
            factors=Factors(
                rows=row_factors.clamp_(max=_LARGEST).view(len(weight), -1, 1),
                columns=columns.rsqrt().clamp_(max=_LARGEST).neg_().view(len(weight), 1, -1),
                least=rows.new_full((), -1 / least if least else -_LARGEST),
            ),
            rate=size.clamp_(min=least_size).mul_(min(float(group["lr"]), 1 / math.sqrt(step))),
            threshold=group["d"],
            decay=1 - float(group["lr"]) * group["weight_decay"],
        )


_TRANSFORMERS = "transformers.optimization.Adafactor"


def rule_of(optimizer_class: type, passes: TilePasses) -> FactoredRule | None:
    """Return the rule of an optimizer class, None if it is stepped whole.

    Args:
        optimizer_class: Class of the optimizer. A subclass has no rule.
        passes: Passes by which it steps.
    """
    if optimizer_class is torch.optim.Adafactor:
        return TorchRule(passes)
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    return TransformersRule(passes) if name == _TRANSFORMERS else None


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
    rounding: WeightRounding | None,
) -> None:
    """Step a weight of two or more dimensions.

    Args:
        rule: Rule of the optimizer.
        state: State of the weight, updated in place; empty before its first step.
        group: Hyperparameters.
        weight: Contiguous weight in fp32 or bf16.
        gradient: Its gradient, in fp32 or bf16.
        rounding: Stochastic rounding of a bf16 weight; None rounds to the nearest value.
    """
    passes, matrices, gradients = rule.passes, _matrices(weight), _matrices(gradient)
    tiles = partial(_tiles, gradients, passes.tile_elements)
    if not state:
        rule.begin(state, gradient)
    with passes.stepping():
        direction = rule.advance(state, group, _square_means(gradients, passes), matrices)
        norms = [passes.update_norms(part, direction.factors.of(tile)) for tile, part in tiles()]
        excess = _root_mean_square(norms, gradients).div_(direction.threshold).clamp_(min=1.0)
        factors = direction.factors.scaled(direction.rate / excess)
        decay = passes.number(direction.decay, matrices)
        for tile, part in tiles():
            passes.write(
                matrices[tile.matrices, tile.rows],
                part,
                factors.of(tile),
                decay=decay,
                rounding=rounding,
                start=(tile.matrices.start * matrices.shape[1] + tile.rows.start) * matrices.shape[2],
            )


def _matrices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


def _tiles(matrices: torch.Tensor, tile_elements: int) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Yield the tiles of a tensor of matrices, and the place of each.

    Fake tensors yield one tile of each shape, which stands for all of them.
    """
    tiles = tiles_of(matrices.shape, tile_elements)
    if isinstance(matrices, FakeTensor):
        shapes = [each.shape for each in tiles]
        for shape, tile in dict(zip(shapes, tiles, strict=True)).items():
            with standing_for(shapes.count(shape)):
                yield tile, matrices[tile.matrices, tile.rows]
        return
    for tile in tiles:
        yield tile, matrices[tile.matrices, tile.rows]


def tiles_of(shape: Sequence[int], tile_elements: int) -> list[Tile]:
    """List the tiles of a weight of two or more dimensions.

    Args:
        shape: Shape of the weight.
        tile_elements: Most elements per tile, if a row is no longer.
    """
    *leading, num_rows, num_columns = shape
    num_at_once = max(1, tile_elements // (num_rows * num_columns))
    step = num_rows if num_at_once > 1 else max(1, tile_elements // num_columns)
    if step > _ROWS_MULTIPLE and step < num_rows:
        step -= step % _ROWS_MULTIPLE
    return [
        Tile(matrices=some, rows=rows)
        for some in _parts(math.prod(leading), num_at_once)
        for rows in _parts(num_rows, step)
    ]


def _parts(whole: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, whole)) for start in range(0, whole, size)]


def _square_means(gradients: torch.Tensor, passes: TilePasses) -> SquareMeans:
    num_matrices, num_rows, num_columns = gradients.shape
    row_norms = gradients.new_empty(num_matrices, num_rows, dtype=torch.float32)
    column_sums = gradients.new_zeros(num_matrices, num_columns, dtype=torch.float32)
    for tile, part in _tiles(gradients, passes.tile_elements):
        norms = passes.norms(part, row_norms[tile.matrices, tile.rows])
        column_sums[tile.matrices].addcmul_(norms, norms)
    return SquareMeans(rows=row_norms.square_().div_(num_columns), columns=column_sums.div_(num_rows))


def _root_mean_square(norms: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of a tensor from its parts' norms, without dimensions and on its device."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([each.view(-1) for each in norms]))
    return norm.div_(math.sqrt(whole.numel()))
