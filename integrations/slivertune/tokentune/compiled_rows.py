"""A selection for compiled layers, in tensors only, so that one graph serves all layers and all forwards."""

import torch

from slivertune.tokentune.numbered_rows import MakeMask, NumberedRows, TokenLayout, merge, take


class CompiledRows(NumberedRows):
    """One forward's selection.

    It stores nothing from one module to the next: the compiler finds values that are computed twice in a layer. It does
    not skip the last layer's other rows after its attention, so that this layer shares the others' graph.

    Args:
        positions: Selected positions, sorted in each row, int64, shape (batch, k).
        is_selected: Mask of the selected positions, bool, shape (batch, n).
        selected: The selected rows of the flattened batch, int64, shape (batch * k,).
        others: The other rows, int64, shape (batch * (n - k),).
    """

    def __init__(
        self, positions: torch.Tensor, is_selected: torch.Tensor, selected: torch.Tensor, others: torch.Tensor
    ) -> None:
        self.positions, self.is_selected = positions, is_selected
        # By sequence, so that the compiler knows their sizes from those of the batch.
        self._selected, self._others = selected.view(positions.shape), others.view(positions.shape[0], -1)

    # These are read from the tensors, so that the compiler takes them for sizes, not for constants.

    @property
    def batch(self) -> int:  # type: ignore[override]
        """Number of sequences."""
        return self.positions.shape[0]

    @property
    def num_selected(self) -> int:  # type: ignore[override]
        """Number of selected positions per sequence."""
        return self.positions.shape[1]

    @property
    def length(self) -> int:  # type: ignore[override]
        """Number of positions per sequence."""
        return self.is_selected.shape[1]

    @property
    def others(self) -> torch.Tensor:
        """The other rows of the flattened batch, int64, shape (batch * (n - k),)."""
        return self._others.flatten()

    def split(self, tensor: torch.Tensor, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a tensor, with the arguments and results of `Rows.split`."""
        by_token = tensor.transpose(1, 2) if layout == "heads" else tensor
        flat = by_token if layout == "flat" else by_token.flatten(0, 1)
        selected = take(flat, self._selected.flatten())
        others = flat.detach().index_select(0, self.others)
        if layout == "flat":
            return selected, others
        parts = [part.unflatten(0, (self.batch, -1)) for part in (selected, others)]
        first, second = [part.transpose(1, 2) for part in parts] if layout == "heads" else parts
        return first, second

    def _merge_flat(self, selected: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        return merge(selected, others, self._selected.flatten(), self.others)

    def mask(self, key: tuple[object, ...], full: torch.Tensor | None, make: MakeMask) -> torch.Tensor | None:
        """Make the attention mask of the selected rows, in each layer, where the compiler fuses it."""
        return make(full)
