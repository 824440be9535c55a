"""The three passes over a tile by compiled functions, a kernel or two per pass.

Each is an operator of its own. A dispatch mode, as of a plan or a ledger, sees one operator, and its bits do not depend
on whether a mode is active. torch would not compile under a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.torch_internals import with_recompile_limit
from slivertune.hift.stochastic_rounding import WeightRounding, rounded
from slivertune.hift.tiled_steps import FactoredRule, Factors, TilePasses, step_in_tiles, tiles_of

TILE_ELEMENTS = 2**24
"""Elements per tile. They have no temporaries. A gradient in bf16 takes 32 MiB, so that a second reading finds it in
the L2 cache of an RTX 4090 (72 MB)."""

_RECOMPILE_LIMIT = 64
"""Compilations of a pass: for each dtype, and for sizes of 1."""


class CompiledPasses(TilePasses):
    """The three passes over a tile, compiled."""

    @property
    @override
    def tile_elements(self) -> int:
        """Most elements per tile."""
        return TILE_ELEMENTS

    @override
    def temporary_bytes(self, *, is_rounded: bool) -> int:
        """Return 0: all values stay in registers."""
        return 0

    @override
    def norms(self, gradient: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
        """Write the norms of rows, and return those of columns."""
        norms: tuple[torch.Tensor, torch.Tensor] = _tile_norms(gradient)
        of_rows.copy_(norms[0])
        return norms[1]

    @override
    def update_norm(self, gradient: torch.Tensor, factors: Factors) -> torch.Tensor:
        """Return the norm of a tile's update."""
        norm: torch.Tensor = _tile_norm(gradient, factors.rows, factors.columns, factors.least)
        return norm

    @override
    def weight_norm(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return the norm of a whole weight, at once."""
        norm: torch.Tensor = _tile_norm(matrices.view(1, -1, matrices.shape[-1]), None, None, None)
        return norm

    @override
    def number(self, value: float, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor, since a number would be compiled into the function."""
        return like.new_full((), value, dtype=torch.float32)

    @override
    def write(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        factors: Factors,
        *,
        decay: torch.Tensor,
        rounding: WeightRounding | None,
        start: int,
    ) -> None:
        """Add the update to a tile of the weight."""
        offset = None if rounding is None else weight.new_full((), rounding.offset(start), dtype=torch.int32)
        _tile_write(weight, gradient, factors.rows, factors.columns, factors.least, decay, offset)


def compile_passes(
    rule: FactoredRule,
    group: Mapping[str, Any],
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_rounded: bool,
) -> None:
    """Compile what the steps of a weight need, by a step of zeros for each kind of its tiles.

    Args:
        rule: Rule that steps by `CompiledPasses`.
        group: Hyperparameters of the weight.
        shape: Shape of the weight.
        dtype: Dtype that is stepped.
        device: Device of the steps.
        is_rounded: Whether new values are rounded stochastically.
    """
    num_columns = shape[-1]
    for num_matrices, num_rows in sorted({tile.shape for tile in tiles_of(shape, rule.passes.tile_elements)}):
        # Code for equal sizes would be for them alone.
        is_equal = num_rows in (num_matrices, num_columns) and num_rows > 2
        tile = (num_matrices, num_rows - is_equal, num_columns)
        kind = (type(rule), dtype, device, is_rounded, *(min(size, 2) for size in tile))
        if kind not in _compiled_kinds:
            zeros = torch.zeros(tile, dtype=dtype, device=device)
            step_in_tiles(rule, {}, group, zeros, torch.zeros_like(zeros), WeightRounding(0) if is_rounded else None)
            _compiled_kinds.add(kind)


_compiled_kinds: set[tuple[Any, ...]] = set()


@torch.library.custom_op("slivertune::tile_norms", mutates_args=())
def _tile_norms(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    norms: tuple[torch.Tensor, torch.Tensor] = _run(_norms, gradient)
    return norms


@_tile_norms.register_fake
def _(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_matrices, num_rows, num_columns = gradient.shape
    new = partial(gradient.new_empty, dtype=torch.float32)
    return new((num_matrices, num_rows)), new((num_matrices, num_columns))


@torch.library.custom_op("slivertune::tile_norm", mutates_args=())
def _tile_norm(
    tile: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, least: torch.Tensor | None
) -> torch.Tensor:
    norm: torch.Tensor = _run(_norm, tile, rows, columns, least)
    return norm


@_tile_norm.register_fake
def _(
    tile: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, least: torch.Tensor | None
) -> torch.Tensor:
    return tile.new_empty((), dtype=torch.float32)


@torch.library.custom_op("slivertune::tile_write", mutates_args=("weight",))
def _tile_write(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    least: torch.Tensor | None,
    decay: torch.Tensor,
    offset: torch.Tensor | None,
) -> None:
    _run(_write, weight, gradient, rows, columns, least, decay, offset)


@_tile_write.register_fake
def _(*arguments: object) -> None:
    pass


def _run(function: Callable[..., Any], *arguments: torch.Tensor | None) -> Any:
    with torch.no_grad(), with_recompile_limit(_RECOMPILE_LIMIT):
        return _compiled(function)(*arguments)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Measured choices between kernels could differ between ranks and runs, and so could the bits.
    return torch.compile(function, fullgraph=True, dynamic=True, options={"deterministic": True})


def _norms(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    squares = gradient.to(torch.float32).square()
    return squares.sum(2).sqrt(), squares.sum(1).sqrt()


def _norm(
    tile: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, least: torch.Tensor | None
) -> torch.Tensor:
    values = tile.to(torch.float32)
    if rows is not None and columns is not None:
        values = _update(values, rows, columns, least)
    return values.square().sum().sqrt()


def _write(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    least: torch.Tensor | None,
    decay: torch.Tensor,
    offset: torch.Tensor | None,
) -> None:
    values = _update(gradient.to(torch.float32), rows, columns, least) + decay * weight.to(torch.float32)
    weight.copy_(values if offset is None else rounded(values, offset))


def _update(
    gradient: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, least: torch.Tensor | None
) -> torch.Tensor:
    if least is None:
        return gradient * rows * columns
    return (rows * columns).clamp(min=least) * gradient
