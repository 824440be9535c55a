"""The selected and the other rows of a batch: apart, and together again, with gradients for the selected ones alone.

And which selection is in force: the running forward's, or that of the forward whose layers a backward computes again.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from slivertune.core.outputs import with_tensors_replaced
from slivertune.core.torch_internals import (
    NO_BACKWARD,
    at_end_of_backward,
    running_backward,
    version_of,
    viewed_by,
)
from slivertune.tokentune.compiled_rows import CompiledRows
from slivertune.tokentune.numbered_rows import MakeMask, NumberedRows, TokenLayout, merge, take

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Let `torch.compile` leave a function out, which it would compile again for every batch.

    Args:
        function: What finds things by the identity of tensors.
    """
    left_out: _F = torch.compiler.disable(function, reason="it finds things by the identity of a batch's tensors")
    return left_out


class Rows(NumberedRows):
    """One forward's selection, as indices into the rows of its hidden states."""

    def __init__(self, positions: torch.Tensor, length: int, *, is_checkpointed: bool = False) -> None:
        """Number the rows.

        Args:
            positions: Selected positions, sorted in each row, int64, shape (batch, k).
            length: Positions n in a sequence.
            is_checkpointed: Whether layers are computed again in the backward.
        """
        self.is_checkpointed = is_checkpointed
        self.positions = positions
        self.batch, self.num_selected = positions.shape
        self.length = length
        first = torch.arange(self.batch, device=positions.device)[:, None] * length
        is_other = torch.ones(self.batch, length, dtype=torch.bool, device=positions.device)
        self.is_selected = ~is_other.scatter_(1, positions, False)
        others = is_other.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        self.selected = (first + positions).flatten()
        """Selected rows of the flattened batch, int64, shape (batch * k,)."""
        self.others = (first + others[:, : length - self.num_selected]).flatten()
        """The other rows, int64, shape (batch * (n - k),)."""
        self.is_shrunk = False
        """Whether the model's head gets the selected rows alone, so that nothing reads the last layer's others."""
        self.live_layers: set[int] = set()
        """Layers that anything in the backward reaches; the others run as they are."""
        self._masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._last_layer_entry: Any = None
        self._is_past_attention = False
        self._for_compiled: CompiledRows | None = None
        self._parts: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor, torch.Tensor]] = {}

    @uncompiled
    def split(self, tensor: torch.Tensor, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a tensor apart. It costs nothing for what `merge` has just put together.

        Args:
            tensor: A floating-point tensor with the tokens where `layout` says.
            layout: Where.

        Returns:
            The selected rows, through which gradients flow, and the others as constants, each laid out like the tensor.
        """
        base = viewed_by(tensor)
        is_all_of_base = tensor.numel() == base.numel() and tensor.is_contiguous()
        known = self._parts.get(id(base))
        if (
            known is not None
            and is_all_of_base
            and known[0]() is base
            and known[1] == version_of(tensor)
            # What a checkpoint computed without a graph has become its output, which has one.
            and known[2].requires_grad == tensor.requires_grad
        ):
            return self._lay_out(known[2], tensor, layout), self._lay_out(known[3], tensor, layout)
        by_token = tensor.transpose(1, 2) if layout == "heads" else tensor
        flat = by_token if layout == "flat" else by_token.flatten(0, 1)
        selected = take(flat, self.selected)
        others = flat.detach().index_select(0, self.others)
        if is_all_of_base and layout != "heads":
            # As when projections of queries, keys and values share an input. Whether that is a view must not matter:
            # what a checkpoint was given as one comes back as none from the host (`offload_activations`).
            self._remember(base, selected, others)
        if layout == "flat":
            return selected, others
        parts = [part.unflatten(0, (self.batch, -1)) for part in (selected, others)]
        selected, others = [part.transpose(1, 2) for part in parts] if layout == "heads" else parts
        return selected, others

    @uncompiled
    def merge(self, selected: torch.Tensor, others: torch.Tensor | None, layout: TokenLayout) -> torch.Tensor:
        """Put two parts together; see `NumberedRows.merge`."""
        return super().merge(selected, others, layout)

    def _merge_flat(self, selected: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        merged = merge(selected, others, self.selected, self.others)
        if others is not None:
            self._remember(merged, selected, others)
        return merged

    def mask(self, key: tuple[Any, ...], full: torch.Tensor | None, make: MakeMask) -> torch.Tensor | None:
        """The attention mask of the selected rows, made once for all layers that share a full mask.

        Args:
            key: Of everything else that decides about it.
            full: The mask of all rows.
            make: Makes it of the full one.
        """
        key = (id(full), *key)
        if key not in self._masks:
            # The full mask is kept beside it: while it lives, no other has its id.
            self._masks[key] = (full, make(full))
        return self._masks[key][1]

    def skips_others(self, module: Any) -> bool:
        """Whether a module of the last layer runs past its attention, where nothing reads the other rows.

        Args:
            module: What runs.
        """
        # A checkpointed layer comes in here again from its beginning; no hook of the layer would tell.
        self._last_layer_entry = self._last_layer_entry or module
        if self._last_layer_entry is module:
            self._is_past_attention = False
        return self._is_past_attention

    def pass_last_attention(self) -> bool:
        """The last layer attends; whether its other rows need no attention, and nothing behind it."""
        if self.is_shrunk:
            self._is_past_attention = True
        return self.is_shrunk

    def for_compiled(self) -> CompiledRows:
        """The same selection, for layers that are compiled; made once."""
        if self._for_compiled is None:
            self._for_compiled = CompiledRows(self.positions, self.is_selected, self.selected, self.others)
        return self._for_compiled

    def forget_parts(self) -> None:
        """Let go of the parts of tensors that are still alive."""
        self._parts.clear()

    def _lay_out(self, part: torch.Tensor, tensor: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        if layout == "heads":
            return part.reshape(self.batch, -1, tensor.shape[1], tensor.shape[3]).transpose(1, 2)
        return part.reshape((self.batch, -1, *tensor.shape[2:]) if layout == "tokens" else (-1, *tensor.shape[1:]))

    def _remember(self, tensor: torch.Tensor, selected: torch.Tensor, others: torch.Tensor) -> None:
        key, parts = id(tensor), self._parts
        parts[key] = (weakref.ref(tensor, lambda _: parts.pop(key, None)), version_of(tensor), selected, others)


class _NotPassed:
    """Lives as long as the graph of a forward, which alone holds it."""


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
        self.not_passed: weakref.WeakSet[_NotPassed] = weakref.WeakSet()
        """A mark for each forward whose graph is alive and that no backward has reached."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward has still to pass a forward, or is passing one: it may be that which it runs again.

        If not, a model that runs inside of a backward had no graph before, as where gradients of its output are cached
        and its batch is cut in pieces (Gao et al., 2021).
        """
        return self.of_backward is not None or len(self.not_passed) > 0

    def current(self) -> Rows | None:
        """The selection, or None if nothing should be split."""
        if self.in_forward:
            return self.of_forward
        return self.of_backward if in_backward() else None

    def leave_forward(self) -> None:
        """Forget the forward that has ended."""
        self.in_forward, self.of_forward = False, None

    def leave_backward(self) -> None:
        """Forget the forward whose backward has ended."""
        self.of_backward = None


class LayerRows:
    """What the modules of one layer, and its attention, ask for the selection."""

    def __init__(self, selection: SelectionContext, *, is_last: bool) -> None:
        self.selection = selection
        self.is_last = is_last
        self.has_other_forwards = False
        """Whether a module of the layer had another forward before: what that trains need not be a parameter here."""
        self.is_compiled = False
        """Whether the layer's forward is compiled by itself (`compile_blocks`)."""
        self._entered: CompiledRows | None = None

    def enter(self, *, is_compiled: bool) -> None:
        """The layer is about to run. What is compiled finds its selection here, and asks for nothing that changes.

        Args:
            is_compiled: Whether its forward is compiled by itself.
        """
        rows = self._current() if is_compiled else None
        self.is_compiled, self._entered = is_compiled, None if rows is None else rows.for_compiled()

    def leave_forward(self) -> None:
        """Forget the forward that has ended."""
        self._entered = None

    def live_rows(self) -> Rows | CompiledRows | None:
        """The selection; None outside of training and where no gradient reaches the layer."""
        return self._entered if self.is_compiled else self._current()

    def _current(self) -> Rows | None:
        rows = self.selection.current()
        return rows if rows is not None and id(self) in rows.live_layers else None


def in_backward() -> bool:
    """Whether this thread runs a part of a backward, as when a checkpoint computes a layer again."""
    return running_backward() != NO_BACKWARD


@uncompiled
def mark_passed(output: Any, selection: SelectionContext, rows: Rows) -> Any:
    """Mark the layers' output. When the backward passes it, layers that it computes again are this forward's.

    Within a backward, nodes run in the reverse order of their making, so that the layers of a later forward are done
    before an earlier one's output is passed.

    Args:
        output: A nest of tensors, any of which the loss may be made of: hidden states, and what was pooled of them.
        selection: What modules ask.
        rows: The running forward's selection.
    """
    mark = _NotPassed()

    def enter(gradient: torch.Tensor) -> None:
        if selection.is_removed and rows.is_checkpointed:
            raise RuntimeError(
                "TokenTune was removed between the forward and the backward of checkpointed layers, which would now be "
                "computed again without it; run the backward before remove(), or inside of the context"
            )
        selection.of_backward = rows
        selection.not_passed.discard(mark)
        # At the end of this backward, so that nothing of the forward is kept alive by it.
        at_end_of_backward(selection.leave_backward)
        # What the first layer gets may be a leaf (PEFT lets it be one), which its selected rows, kept beside it, keep
        # alive, so that both would wait for the garbage collector.
        at_end_of_backward(rows.forget_parts)

    def marked(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        passed = tensor.view_as(tensor)
        passed.register_hook(enter)
        selection.not_passed.add(mark)
        return passed

    return with_tensors_replaced(output, marked)
