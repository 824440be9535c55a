"""A selection as compiled layers see it: tensors alone, so that one graph serves all layers and all forwards."""

import torch

from slivertune.tokentune.numbered_rows import MakeMask, NumberedRows, TokenLayout, merge, take


class CompiledRows(NumberedRows):
    """One forward's selection.

    Nothing is remembered from one module to the next: the compiler finds what is computed twice within a layer. The
    last layer's other rows are not skipped behind its attention, so that it shares the graph of the others.

    Args:
        positions: Selected positions, sorted in each row, int64, shape (batch, k).
        is_selected: bool, shape (batch, n).
        selected: The selected rows of the flattened batch, int64, shape (batch * k,).
        others: The other rows, int64, shape (batch * (n - k),).
    """

    def __init__(
        self, positions: torch.Tensor, is_selected: torch.Tensor, selected: torch.Tensor, others: torch.Tensor
    ) -> None:
        self.positions, self.is_selected = positions, is_selected
        # By sequence: what a compiler knows of their sizes then is what it knows of the batch's.
        self._selected, self._others = selected.view(positions.shape), others.view(positions.shape[0], -1)

    # Read from the tensors, so that the compiler takes them for sizes, not for constants.

    @property
    def batch(self) -> int:  # type: ignore[override]
        """Sequences."""
        return self.positions.shape[0]

    @property
    def num_selected(self) -> int:  # type: ignore[override]
        """Selected positions in a sequence."""
        return self.positions.shape[1]

    @property
    def length(self) -> int:  # type: ignore[override]
        """Positions in a sequence."""
        return self.is_selected.shape[1]

    @property
    def others(self) -> torch.Tensor:
        """The other rows of the flattened batch, int64, shape (batch * (n - k),)."""
        return self._others.flatten()

    def split(self, tensor: torch.Tensor, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a tensor apart; arguments and results as those of `Rows.split`."""
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
        """The attention mask of the selected rows; made in each layer, where the compiler fuses it."""
        return make(full)
