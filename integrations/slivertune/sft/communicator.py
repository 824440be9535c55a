"""Communication between ranks that train the same deltas on different data (none in a single process)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from slivertune.core.layout import world_size


class ChunkKey(NamedTuple):
    """Key of a part of a dense gradient, the same on every rank."""

    weight: int
    """Number of the tensor among the trained ones."""
    end: int
    """Estimation phase that examines the part, by the update that ends it."""
    start: int
    """Position of the part's first element in the flattened tensor."""
    length: int
    """Number of elements of the part."""

    def order(self) -> tuple[int, int, int]:
        """Return the key by which chunks are sorted: from the model's last tensor to its first, as a backward goes."""
        return -self.weight, self.end, self.start


NOWHERE = ChunkKey(-1, 0, 0, 0)
"""Key after all chunks, of a rank that has no more gradients in this backward."""


class Communicator:
    """Communicator of a single process, whose values are their own means.

    `slivertune.parallel` has the one for several ranks. Its methods from `meet` on are collectives: all ranks call them
    together.
    """

    is_alone = True
    """Whether there are no other ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the data that all ranks have."""
        return True

    def check(self) -> None:
        """Check that no other ranks train beside this one, each on its own deltas.

        Raises:
            RuntimeError: If other ranks do.
        """
        if world_size() > 1:
            raise RuntimeError(
                f"{world_size()} ranks train with SFT, and nothing averages their gradients and candidates. "
                "Pass model and optimizer through slivertune.prepare(accelerator, model, optimizer, ...) in place of "
                "accelerator.prepare, slivertune.initialize in place of deepspeed.initialize, or slivertune.attach "
                "with a Trainer"
            )

    def is_last(self) -> bool:
        """Return whether the running backward is the last one before the update."""
        return True

    def enter(self, updates: int) -> None:
        """Record this rank's progress for the errors of other ranks, without a collective.

        Args:
            updates: Number of updates applied so far.
        """

    def meet(self) -> None:
        """Check that all ranks are at the same update.

        Raises:
            RuntimeError: If they are not, before anything was averaged.
        """

    def earliest(self, key: ChunkKey, device: torch.device) -> ChunkKey:
        """Return the earliest chunk among those of all ranks.

        Args:
            key: Chunk of this rank.
            device: Device of its gradients.
        """
        return key

    def union(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        """Return the positions of all ranks, each once.

        Args:
            positions: Positions of this rank, int32, sorted.
            most: Upper bound of the number on any rank; the same on all of them.

        Returns:
            Positions, int32, sorted.
        """
        return positions

    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set tensors to their mean over the ranks, in place.

        Args:
            tensors: Tensors in fp32, on one device, of the same shapes on every rank.
        """

    def compare(self, updates: int, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """Check that all ranks hold the same tensors.

        Args:
            updates: Number of updates applied so far.
            fingerprint: Tensors by name.

        Raises:
            RuntimeError: If they do not.
        """


ALONE = Communicator()
"""The communicator of one process."""
