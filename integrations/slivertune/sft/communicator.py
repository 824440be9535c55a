"""What ranks that train the same deltas on different data have to tell each other; alone, nothing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class ChunkKey(NamedTuple):
    """A part of a dense gradient, as every rank names it."""

    weight: int
    """The tensor's number among the trained ones."""
    end: int
    """The estimation phase that looks at it, by the update that ends it."""
    start: int
    """Position of the part's first element in the flattened tensor."""
    length: int
    """Elements of the part."""

    def order(self) -> tuple[int, int, int]:
        """What chunks are sorted by: as a backward goes, from the model's last tensor to its first."""
        return -self.weight, self.end, self.start


NOWHERE = ChunkKey(-1, 0, 0, 0)
"""After all chunks: where a rank is that has no more gradients in this backward."""


class Communicator:
    """One process: every sum is its own.

    `slivertune.parallel` has the one for ranks. The methods from `meet` on are collectives there: all ranks call
    them together.
    """

    is_alone = True
    """Whether there are no other ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes what all have."""
        return True

    def check(self) -> None:
        """Check that no ranks train beside this one, each on its own deltas.

        Raises:
            RuntimeError: If they do.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{dist.get_world_size()} ranks train with SFT, and nothing averages their gradients and candidates; "
                "pass model and optimizer through slivertune.prepare(accelerator, model, optimizer, ...) in place of "
                "accelerator.prepare, slivertune.initialize in place of deepspeed.initialize, or slivertune.attach "
                "with a Trainer"
            )

    def is_last(self) -> bool:
        """Whether the running backward is the last one before the update."""
        return True

    def enter(self, updates: int) -> None:
        """Note where this rank is, for errors of others. No collective.

        Args:
            updates: Updates applied so far.
        """

    def meet(self) -> None:
        """Check that all ranks are at the same update.

        Raises:
            RuntimeError: If they are not, before anything was averaged.
        """

    def earliest(self, key: ChunkKey, device: torch.device) -> ChunkKey:
        """Where the rank is whose turn comes first.

        Args:
            key: Where this rank is.
            device: Where its gradients are.
        """
        return key

    def union(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        """All ranks' positions, each once.

        Args:
            positions: int32, sorted, on this rank.
            most: At least as many as any rank has; the same on all of them.

        Returns:
            int32, sorted.
        """
        return positions

    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set tensors to their mean over the ranks, in place.

        Args:
            tensors: fp32, on one device, of the same shapes on every rank.
        """

    def compare(self, updates: int, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """Check that all ranks hold the same.

        Args:
            updates: Updates applied so far.
            fingerprint: Tensors by name.

        Raises:
            RuntimeError: If they don't.
        """


ALONE = Communicator()
"""The communicator of one process."""
