"""Selected and other rows of a batch: their split and merge, with gradients only for the selected ones.

The selection in force is the running forward's, or that of the forward whose layers the backward recomputes.
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
    """Exclude a function from `torch.compile`, which would recompile it for every batch.

    Args:
        function: Function that finds objects by the identity of tensors.
    """
    left_out: _F = torch.compiler.disable(function, reason="it finds things by the identity of a batch's tensors")
    return left_out


class Rows(NumberedRows):
    """One forward's selection, as indices into the rows of its hidden states."""

    def __init__(self, positions: torch.Tensor, length: int, *, is_checkpointed: bool = False) -> None:
        """Compute the numbers of the rows.

        Args:
            positions: Selected positions, sorted in each row, int64, shape (batch, k).
            length: Number n of positions per sequence.
            is_checkpointed: Whether layers are recomputed in the backward.
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
        """Whether the model's head gets only the selected rows, so that nothing reads the last layer's other rows."""
        self.live_layers: set[int] = set()
        """Layers that the backward reaches. The others run unchanged."""
        self._masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._last_layer_entry: Any = None
        self._is_past_attention = False
        self._for_compiled: CompiledRows | None = None
        self._parts: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor, torch.Tensor]] = {}

    @uncompiled
    def split(self, tensor: torch.Tensor, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a tensor into selected and other rows, at no cost for a tensor that `merge` has just made.

        Args:
            tensor: Floating-point tensor with its tokens in the place of `layout`.
            layout: Place of the tokens.

        Returns:
            Selected rows, through which gradients flow, and the others as constants, each laid out like the tensor.
        """
        base = viewed_by(tensor)
        is_all_of_base = tensor.numel() == base.numel() and tensor.is_contiguous()
        known = self._parts.get(id(base))
        if (
            known is not None
            and is_all_of_base
            and known[0]() is base
            and known[1] == version_of(tensor)
            # A tensor computed without a graph may have become a checkpoint's output, which has one.
            and known[2].requires_grad == tensor.requires_grad
        ):
            return self._lay_out(known[2], tensor, layout), self._lay_out(known[3], tensor, layout)
        by_token = tensor.transpose(1, 2) if layout == "heads" else tensor
        flat = by_token if layout == "flat" else by_token.flatten(0, 1)
        selected = take(flat, self.selected)
        others = flat.detach().index_select(0, self.others)
        if is_all_of_base and layout != "heads":
            # Projections of queries, keys and values share an input. Whether it is a view must not matter: a
            # checkpoint's input that was a view comes back from the host (`offload_activations`) as none.
            self._remember(base, selected, others)
        if layout == "flat":
            return selected, others
        parts = [part.unflatten(0, (self.batch, -1)) for part in (selected, others)]
        selected, others = [part.transpose(1, 2) for part in parts] if layout == "heads" else parts
        return selected, others

    @uncompiled
    def merge(self, selected: torch.Tensor, others: torch.Tensor | None, layout: TokenLayout) -> torch.Tensor:
        """Merge two parts, as `NumberedRows.merge` does."""
        return super().merge(selected, others, layout)

    def _merge_flat(self, selected: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        merged = merge(selected, others, self.selected, self.others)
        if others is not None:
            self._remember(merged, selected, others)
        return merged

    def mask(self, key: tuple[Any, ...], full: torch.Tensor | None, make: MakeMask) -> torch.Tensor | None:
        """Return the attention mask of the selected rows, made once for all layers that share a full mask.

        Args:
            key: Key of everything else on which the mask depends.
            full: Mask of all rows.
            make: Function that makes it from the full mask.
        """
        key = (id(full), *key)
        if key not in self._masks:
            # The full mask is stored, too: while it lives, no other mask has its id.
            self._masks[key] = (full, make(full))
        return self._masks[key][1]

    def skips_others(self, module: Any) -> bool:
        """Return whether a module of the last layer runs after its attention, where nothing reads the other rows.

        Args:
            module: Module that runs.
        """
        # A checkpointed layer enters here again from its beginning. No hook of the layer would tell.
        self._last_layer_entry = self._last_layer_entry or module
        if self._last_layer_entry is module:
            self._is_past_attention = False
        return self._is_past_attention

    def pass_last_attention(self) -> bool:
        """Record the last layer's attention, and return whether it and all modules after it skip the other rows."""
        if self.is_shrunk:
            self._is_past_attention = True
        return self.is_shrunk

    def for_compiled(self) -> CompiledRows:
        """Return the same selection for compiled layers, made once."""
        if self._for_compiled is None:
            self._for_compiled = CompiledRows(self.positions, self.is_selected, self.selected, self.others)
        return self._for_compiled

    def forget_parts(self) -> None:
        """Drop the recorded parts of tensors that are still alive."""
        self._parts.clear()

    def _lay_out(self, part: torch.Tensor, tensor: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        if layout == "heads":
            return part.reshape(self.batch, -1, tensor.shape[1], tensor.shape[3]).transpose(1, 2)
        return part.reshape((self.batch, -1, *tensor.shape[2:]) if layout == "tokens" else (-1, *tensor.shape[1:]))

    def _remember(self, tensor: torch.Tensor, selected: torch.Tensor, others: torch.Tensor) -> None:
        key, parts = id(tensor), self._parts
        parts[key] = (weakref.ref(tensor, lambda _: parts.pop(key, None)), version_of(tensor), selected, others)


class _NotPassed:
    """Mark that lives as long as the graph of a forward, which alone holds it."""


class SelectionContext:
    """The selection that modules use at this moment.

    It is the running forward's. While a backward recomputes a layer, it is that of the layer's forward.
    """

    def __init__(self) -> None:
        self.in_forward = False
        """Whether the model's forward runs, in training or not."""
        self.of_forward: Rows | None = None
        """Selection of the running forward, or None to change nothing."""
        self.of_backward: Rows | None = None
        """Selection of the forward whose output the backward has passed last."""
        self.is_removed = False
        """Whether the hook is removed, so that recomputed layers would run without it."""
        self.not_passed: weakref.WeakSet[_NotPassed] = weakref.WeakSet()
        """Marks of the forwards whose graph is alive and that no backward has reached."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward has still to pass a forward, or is passing one and may run it again.

        If not, a model that runs inside of a backward had no graph before. Gradient caching does so: it caches the
        gradients of the output and cuts the batch in pieces (Gao et al., 2021).
        """
        return self.of_backward is not None or len(self.not_passed) > 0

    def current(self) -> Rows | None:
        """Return the selection, or None if nothing should be split."""
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
    """The selection for the modules of one layer and its attention."""

    def __init__(self, selection: SelectionContext, *, is_last: bool) -> None:
        self.selection = selection
        self.is_last = is_last
        self.has_other_forwards = False
        """Whether a module of the layer had another forward before, whose trained tensors may be no parameters here."""
        self.is_compiled = False
        """Whether the layer's forward is compiled by itself (`compile_blocks`)."""
        self._entered: CompiledRows | None = None

    def enter(self, *, is_compiled: bool) -> None:
        """Store the selection before the layer runs, for compiled code, which must read nothing that changes.

        Args:
            is_compiled: Whether the layer's forward is compiled by itself.
        """
        rows = self._current() if is_compiled else None
        self.is_compiled, self._entered = is_compiled, None if rows is None else rows.for_compiled()

    def leave_forward(self) -> None:
        """Forget the forward that has ended."""
        self._entered = None

    def live_rows(self) -> Rows | CompiledRows | None:
        """Return the selection, or None outside of training or if no gradient reaches the layer."""
        return self._entered if self.is_compiled else self._current()

    def _current(self) -> Rows | None:
        rows = self.selection.current()
        return rows if rows is not None and id(self) in rows.live_layers else None


def in_backward() -> bool:
    """Return whether this thread runs a part of a backward, such as a checkpoint that recomputes a layer."""
    return running_backward() != NO_BACKWARD


@uncompiled
def mark_passed(output: Any, selection: SelectionContext, rows: Rows) -> Any:
    """Mark the layers' output, so that layers recomputed after a backward passes it use this forward's selection.

    Within a backward, nodes run in the reverse order of their making. So the layers of a later forward are done before
    the backward passes an earlier one's output.

    Args:
        output: Nest of tensors, any of which the loss may use: hidden states, and values pooled from them.
        selection: Selection that modules read.
        rows: The running forward's selection.
    """
    mark = _NotPassed()

    def enter(gradient: torch.Tensor) -> None:
        if selection.is_removed and rows.is_checkpointed:
            raise RuntimeError(
                "TokenTune was removed between the forward and the backward of checkpointed layers, which would be "
                "recomputed without it. Run the backward before remove(), or inside of the context"
            )
        selection.of_backward = rows
        selection.not_passed.discard(mark)
        # This runs at the end of this backward, so that it keeps nothing of the forward alive.
        at_end_of_backward(selection.leave_backward)
        # The first layer's input may be a leaf (with PEFT). The selected rows stored beside it would keep it alive, and
        # both would wait for the garbage collector.
        at_end_of_backward(rows.forget_parts)

    def marked(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        passed = tensor.view_as(tensor)
        passed.register_hook(enter)
        selection.not_passed.add(mark)
        return passed

    return with_tensors_replaced(output, marked)
