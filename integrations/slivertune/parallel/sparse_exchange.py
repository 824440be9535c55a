"""SFT's exchange over torch.distributed: small all-reduces and all-gathers, nothing of a dense gradient's size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from slivertune.ledger import claim
from slivertune.parallel.agreement import Whereabouts, digest
from slivertune.sft.exchange import NOWHERE, Exchange, Place

_NO_POSITION = -1


class RankExchange(Exchange):
    """Exchanges over the default process group.

    Bytes that a rank contributes: 4 for each trained weight in an update, 8 in an estimation phase; in the first update
    of a phase, for each micro-batch, 8 and 4 for each rank (the positions, then the values at all ranks' positions).

    Args:
        is_last: Whether the running backward is the last one before the update; the same on every rank.
    """

    is_alone = False

    def __init__(self, is_last: Callable[[], bool]) -> None:
        self._is_last = is_last
        self._whereabouts = Whereabouts("sft")
        self._whereabouts.enter(0, "before its first update")

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes what all have."""
        return dist.get_rank() == 0

    def check(self) -> None:
        """Nothing to check: there is an exchange."""

    def is_last(self) -> bool:
        """Whether the running backward is the last one before the update."""
        return self._is_last()

    def earliest(self, place: Place, device: torch.device) -> Place:
        """Where the rank is whose turn comes first."""
        own = torch.tensor(place, dtype=torch.int64, device=device)
        with self._whereabouts.guard(f"choosing candidates in {_named(place)}"):
            places = _gathered(own)
        return min((Place(*each) for each in places.tolist()), key=Place.turn)

    def union(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        """All ranks' positions, each once, sorted."""
        padded = positions.new_full((most,), _NO_POSITION)
        padded[: positions.numel()] = positions
        with self._whereabouts.guard("gathering the positions of candidates"):
            found: torch.Tensor = _gathered(padded).unique()
        return found.masked_select(found != _NO_POSITION)

    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set tensors to their mean over the ranks, by one all-reduce."""
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        claim(flat, "gradients")
        # Divided before the sum, which then has the range of one gradient.
        flat.div_(dist.get_world_size())
        with self._whereabouts.guard("averaging the gradients of the deltas"):
            dist.all_reduce(flat)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def enter(self, updates: int) -> None:
        """Note that this rank works on the update after so many."""
        self._whereabouts.enter(updates, "training")

    def compare(self, updates: int, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """Check that all ranks hold the same."""
        self._whereabouts.compare({"updates": updates, "the positions of the trained weights": digest(fingerprint)})


def _gathered(own: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, in a row each."""
    rows = own.new_empty(dist.get_world_size(), own.numel())
    dist.all_gather(list(rows), own)
    return rows


def _named(place: Place) -> str:
    return "no tensor, at the end of a backward" if place == NOWHERE else f"tensor {place.weight}"
