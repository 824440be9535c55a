"""Masters behind weights that somebody else has written: the weights count, as they do for a plain optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slivertune.hift.piece import Weight


class WeightMarks:
    """Knows which weights were written by others since their group's last step, without reading them.

    `load_state_dict`, `copy_` and arithmetic under `torch.no_grad` raise a tensor's version, and assigning `.data`
    changes its storage; writes into `.data` leave no trace. HiFT's own writes go through `.data`.
    """

    def __init__(self) -> None:
        self._marks: dict[str, tuple[int, int]] = {}

    def note(self, weights: Iterable[Weight]) -> None:
        """Masters and weights belong together now."""
        for weight in weights:
            self._marks[weight.name] = _mark(weight)

    def forget(self) -> None:
        """Of no weight it is known whether its master belongs to it."""
        self._marks = {}

    def stale(self, weights: Iterable[Weight]) -> frozenset[str]:
        """Names of those that may have been written since."""
        return frozenset(weight.name for weight in weights if self._marks.get(weight.name) != _mark(weight))


def refresh_master(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Make a master that of a weight which may have been written: where it does not round to it, it becomes it.

    Elements that were not written keep their master to the bit, so that loading the same weights changes nothing.

    Args:
        master: fp32; changed in place.
        weight: bf16, of the same shape and device.

    Returns:
        The master.
    """
    written = master.to(weight.dtype).view(torch.int16) != weight.view(torch.int16)
    return master.copy_(torch.where(written, weight, master))


def _mark(weight: Weight) -> tuple[int, int]:
    return weight.trained._version, weight.parameter.untyped_storage()._cdata
