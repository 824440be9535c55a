"""The three passes over a tile by compiled functions, a kernel or two per pass.

Each is an operator of its own. A dispatch mode, as of a plan or a ledger, sees one operator, and its bits do not depend
on whether a mode is active. torch would not compile under a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.torch_internals import compiling_as_usual, with_recompile_limit
from slivertune.hift.stochastic_rounding import WeightRounding, rounded
from slivertune.hift.tiled_steps import FactoredRule, Factors, TilePasses, step_in_tiles, tiles_of

TILE_ELEMENTS = 2**24
"""Elements per tile. They have no temporaries. A gradient in bf16 takes 32 MiB, so that a second reading finds it in
the L2 cache of an RTX 4090 (72 MB)."""

_RECOMPILE_LIMIT = 64
"""Most compilations of a pass. Each dtype, device, size of 1 and state of torch (as autocast) takes one."""


class CompiledPasses(TilePasses):
    """The three passes over a tile, compiled."""

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        """Surround the passes by settings of torch under which all steps take the same code."""
        with torch.no_grad(), compiling_as_usual(), with_recompile_limit(_RECOMPILE_LIMIT):
            yield

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
    def update_norms(self, gradient: torch.Tensor, factors: Factors) -> torch.Tensor:
        """Return the norm of each row of a tile's update."""
        norms: torch.Tensor = _tile_row_norms(gradient, factors.rows, factors.columns, factors.least)
        return norms

    @override
    def weight_norms(self, matrices: torch.Tensor) -> list[torch.Tensor]:
        """Return the norm of each row of a whole weight."""
        return [_tile_row_norms(matrices.view(1, -1, matrices.shape[-1]), None, None, None)]

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
    known: set[tuple[Any, ...]],
) -> None:
    """Compile what the steps of a weight need, by a step of zeros for each size of its tiles.

    Args:
        rule: Rule that steps by `CompiledPasses`.
        group: Hyperparameters of the weight.
        shape: Shape of the weight.
        dtype: Dtype that is stepped.
        device: Device of the steps.
        is_rounded: Whether new values are rounded stochastically.
        known: Kinds of tiles that were stepped already. New ones are added.
    """
    num_columns, rounding = shape[-1], WeightRounding(0) if is_rounded else None
    # Code is made for the first sizes of its kind, and takes others. So the largest tiles come first.
    for num_matrices, num_rows in sorted({tile.shape for tile in tiles_of(shape, rule.passes.tile_elements)})[::-1]:
        # torch would take equal sizes for one, and compile code for such tiles alone.
        is_equal = num_rows in (num_matrices, num_columns) and num_rows > 2
        for rows in (num_rows - 1, num_rows) if is_equal else (num_rows,):
            kind = (type(rule), num_matrices, rows, num_columns, dtype, device, is_rounded)
            if kind not in known:
                zeros = torch.zeros(num_matrices, rows, num_columns, dtype=dtype, device=device)
                step_in_tiles(rule, {}, group, zeros, torch.zeros_like(zeros), rounding)
                known.add(kind)


@torch.library.custom_op("slivertune::tile_norms", mutates_args=())
def _tile_norms(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    norms: tuple[torch.Tensor, torch.Tensor] = _run(_norms, gradient)
    return norms


@_tile_norms.register_fake
def _(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_matrices, num_rows, num_columns = gradient.shape
    new = partial(gradient.new_empty, dtype=torch.float32)
    return new((num_matrices, num_rows)), new((num_matrices, num_columns))


@torch.library.custom_op("slivertune::tile_row_norms", mutates_args=())
def _tile_row_norms(
    tile: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, least: torch.Tensor | None
) -> torch.Tensor:
    norms: torch.Tensor = _run(_row_norms, tile, rows, columns, least)
    return norms


@_tile_row_norms.register_fake
def _(tile: torch.Tensor, *factors: object) -> torch.Tensor:
    return tile.new_empty(tile.shape[:2], dtype=torch.float32)


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
    return _compiled(function)(*(None if each is None else _plain(each) for each in arguments))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that is no view, with the usual stride of a single matrix.

    Compiled code is for tensors that are views as those were that it was compiled with, of equal strides.
    """
    one_matrix = tensor.dim() == 3 and tensor.shape[0] == 1
    return tensor.squeeze(0).unsqueeze(0).data if one_matrix else tensor.data


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Measured choices between kernels could differ between ranks and runs, and so could the bits.
    return torch.compile(function, fullgraph=True, dynamic=True, options={"deterministic": True})


def _norms(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    squares = gradient.to(torch.float32).square()
    return squares.sum(2).sqrt(), squares.sum(1).sqrt()


def _row_norms(
    tile: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, least: torch.Tensor | None
) -> torch.Tensor:
    values = tile.to(torch.float32)
    if rows is not None and columns is not None:
        values = _update(values, rows, columns, least)
    return values.square().sum(2).sqrt()  # the sum of all would be compiled for some sizes alone


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
