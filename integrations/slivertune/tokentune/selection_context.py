"""Which selection is in force: the running forward's, or that of the forward whose layers a backward computes again."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slivertune.core.torch_internals import NO_BACKWARD, at_end_of_backward, running_backward
from slivertune.tokentune.rows import Rows, apply_function


class SelectionContext:
    """The selection that modules should use at this moment.

    It is the running forward's or, where a backward computes a layer again, that of the forward it belongs to.
    """

    def __init__(self) -> None:
        self.in_forward = False
        """Whether the model's forward runs, in training or not."""
        self.of_forward: Rows | None = None
        """The running forward's; None lets everything pass."""
        self.of_backward: Rows | None = None
        """That of the forward whose output the backward has passed last."""
        self.is_removed = False
        """Whether the hook is off, so that layers that are computed again would run as they are."""

    def current(self) -> Rows | None:
        """The selection, or None if nothing should be split."""
        if self.in_forward:
            return self.of_forward
        return self.of_backward if in_backward() else None

    def leave_backward(self) -> None:
        """Forget the forward whose backward has ended."""
        self.of_backward = None


def in_backward() -> bool:
    """Whether this thread runs a part of a backward, as when a checkpoint computes a layer again."""
    return running_backward() != NO_BACKWARD


def mark_passed(hidden: torch.Tensor, selection: SelectionContext, rows: Rows) -> torch.Tensor:
    """The layers' output, whose backward puts the selection of this forward in force.

    Args:
        hidden: The output.
        selection: What modules ask.
        rows: The running forward's selection.
    """
    passed: torch.Tensor = apply_function(_Passed, hidden, selection, rows)
    return passed


class _Passed(torch.autograd.Function):
    """The layers' output. When the backward passes it, layers that it computes again are this forward's.

    Within a backward, nodes run in the reverse order of their making, so that the layers of a later forward are done
    before an earlier one's output is passed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, selection: SelectionContext, rows: Rows) -> torch.Tensor:
        ctx.selection, ctx.rows = selection, rows
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        selection: SelectionContext = ctx.selection
        if selection.is_removed and ctx.rows.is_checkpointed:
            raise RuntimeError(
                "TokenTune was removed between the forward and the backward of checkpointed layers, which would now be "
                "computed again without it; run the backward before remove(), or inside of the context"
            )
        selection.of_backward = ctx.rows
        # At the end of this backward, so that nothing of the forward is kept alive by it.
        at_end_of_backward(selection.leave_backward)
        return gradient, None, None
