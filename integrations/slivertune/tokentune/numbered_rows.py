"""Selected and other rows by their numbers: their places in tensors, and how to split and merge them."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from slivertune.core.torch_internals import apply_function

TokenLayout = Literal["tokens", "flat", "heads"]
"""Place of the tokens: (batch, length, ...), (batch * length, ...), or (batch, heads, length, head size)."""

MakeMask = Callable[[torch.Tensor | None], torch.Tensor | None]
"""Function from the attention mask of all rows to that of the selected rows."""


class NumberedRows:
    """A forward's selected rows, which are found in tensors by shape."""

    batch: int
    """Number of sequences."""
    num_selected: int
    """Number k of selected positions per sequence."""
    length: int
    """Number n of positions per sequence."""
    positions: torch.Tensor
    """Selected positions, int64, shape (batch, k)."""
    is_selected: torch.Tensor
    """Whether a position is selected, bool, shape (batch, n)."""

    @property
    def is_all(self) -> bool:
        """Whether every position is selected."""
        return self.num_selected == self.length

    def layout(self, tensor: torch.Tensor) -> TokenLayout | None:
        """Return the layout of a tensor's tokens by its shape, or None without tokens or with four dimensions."""
        if tensor.dim() == 3 and tensor.shape[0] == self.batch and tensor.shape[1] == self.length:
            return "tokens"
        if tensor.dim() == 2 and tensor.shape[0] == self.batch * self.length:
            return "flat"
        return None

    def output_layout(self, tensor: torch.Tensor, given: TokenLayout) -> TokenLayout | None:
        """Return the layout of a module's result from selected rows in the layout `given`, or None if not by token."""
        if given == "heads":
            return "heads"
        if tensor.dim() >= 3 and tensor.shape[:2] == (self.batch, self.num_selected):
            return "tokens"
        if tensor.dim() <= 2 and tensor.dim() >= 1 and tensor.shape[0] == self.batch * self.num_selected:
            return "flat"
        return None

    def merge(self, selected: torch.Tensor, others: torch.Tensor | None, layout: TokenLayout) -> torch.Tensor:
        """Merge selected and other rows.

        Args:
            selected: Selected rows.
            others: The other rows, laid out in the same way; None leaves zeros.
            layout: Layout of both.

        Returns:
            All rows, in the same layout; gradients go to the selected ones.
        """
        if layout == "heads":
            others = None if others is None else others.transpose(1, 2)
            return self.merge(selected.transpose(1, 2), others, "tokens").transpose(1, 2)
        if layout == "tokens":
            others = None if others is None else others.flatten(0, 1)
            flat = self.merge(selected.flatten(0, 1), others, "flat")
            return flat.view(self.batch, self.length, *flat.shape[1:])
        return self._merge_flat(selected, others)

    def _merge_flat(self, selected: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        """Merge the two parts of a flat tensor."""
        raise NotImplementedError

    def constant_others(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, but without gradients for its other rows.

        Args:
            tensor: Keys or values, shape (batch, heads, n, head size).
        """
        return apply_function(_ConstantOthers, tensor, self.is_selected) if tensor.requires_grad else tensor


def take(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Take some rows of a flat tensor, through which gradients flow.

    Args:
        tensor: Tensor, shape (num_rows, ...).
        rows: Numbers of the rows, each once, int64.
    """
    return apply_function(_Take, tensor, rows)


def merge(
    selected: torch.Tensor, others: torch.Tensor | None, selected_rows: torch.Tensor, other_rows: torch.Tensor
) -> torch.Tensor:
    """Merge selected rows and constants into a flat tensor.

    Args:
        selected: The selected rows, through which gradients flow.
        others: Constants; None leaves zeros.
        selected_rows: Places of the selected rows, int64.
        other_rows: Places of the others, int64; both together name each row once.
    """
    return apply_function(_Merge, selected, others, selected_rows, other_rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = tensor.shape[0]
        return tensor.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        full = gradient.new_zeros((ctx.num_rows, *gradient.shape[1:]))
        return full.index_copy_(0, rows, gradient), None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        selected: torch.Tensor,
        others: torch.Tensor | None,
        selected_rows: torch.Tensor,
        other_rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(selected_rows)
        merged = selected.new_empty((selected_rows.shape[0] + other_rows.shape[0], *selected.shape[1:]))
        merged.index_copy_(0, selected_rows, selected)
        if others is None:
            return merged.index_fill_(0, other_rows, 0)
        return merged.index_copy_(0, other_rows, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (selected_rows,) = ctx.saved_tensors
        return gradient.index_select(0, selected_rows), None, None, None


class _ConstantOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, is_selected: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(is_selected)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (is_selected,) = ctx.saved_tensors
        return gradient * is_selected[:, None, :, None], None
