"""SFT's collectives over torch.distributed: small all-reduces and all-gathers, nothing of a dense gradient's size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.hyperparameters import own_hyperparameters
from slivertune.core.ledger import claim
from slivertune.parallel.consistency.headers import Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat, comparable, digest
from slivertune.sft import SFT
from slivertune.sft.communicator import NOWHERE, ChunkKey, Communicator

_NO_POSITION = -1


class RankCommunicator(Communicator):
    """Collectives over the default process group.

    Bytes that a rank contributes: 4 for each trained weight in an update, 8 in an estimation phase; in the first update
    of a phase, for each micro-batch, 8 and 4 for each rank (the positions, then the values at all ranks' positions).

    Args:
        is_last: Whether the running backward is the last one before the update; the same on every rank.
    """

    is_alone = False

    def __init__(self, is_last: Callable[[], bool]) -> None:
        self._is_last = is_last
        self._heartbeat = Heartbeat("sft")
        self._heartbeat.enter(0, "before its first update")
        self._updates = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes what all have."""
        return dist.get_rank() == 0

    def check(self) -> None:
        """Nothing to check: the ranks are connected."""

    def is_last(self) -> bool:
        """Whether the running backward is the last one before the update."""
        return self._is_last()

    def meet(self, stage: Stage = Stage.GRADIENT_SYNC, settings: Mapping[str, object] | None = None) -> None:
        """Check that all ranks are about to do the same, at the same update and with the same settings."""
        self._heartbeat.meet(Header(stage, self._updates), settings)

    def keep_together(self, sft: SFT) -> None:
        """Compare, before every step from now on, where the ranks are and what they apply.

        Args:
            sft: Communicates by this.
        """

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._updates = sft.updates  # a checkpoint may have been loaded
            options = own_hyperparameters(sft.param_groups[0])
            self.meet(Stage.STEPPING, {key: comparable(each) for key, each in options.items()})

        sft.register_step_pre_hook(before)

    def compare_all(self, sft: SFT) -> None:
        """Compare positions and deltas, wherever the phases stand. A collective.

        Args:
            sft: Communicates by this.

        Raises:
            RuntimeError: On every rank, if they have drifted apart.
        """
        deltas = {name: delta.values for name, delta in sft.deltas().items()}
        self._heartbeat.compare(
            {
                "updates": sft.updates,
                "the positions of the trained weights": digest(sft.positions()),
                "the deltas": digest(deltas),
            },
            Header(Stage.SAVING, sft.updates),
        )

    def earliest(self, key: ChunkKey, device: torch.device) -> ChunkKey:
        """Where the rank is whose turn comes first."""
        own = torch.tensor(key, dtype=torch.int64, device=device)
        with self._heartbeat.guard(f"choosing candidates in {_named(key)}"):
            rows = own.new_empty(dist.get_world_size(), own.numel())
            dist.all_gather(list(rows), own)
            places = rows.tolist()
        return min((ChunkKey(*each) for each in places), key=ChunkKey.order)

    def union(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        """All ranks' positions, each once, sorted."""
        padded = positions.new_full((most,), _NO_POSITION)
        padded[: positions.numel()] = positions
        with self._heartbeat.guard("gathering the positions of candidates"):
            rows = padded.new_empty(dist.get_world_size(), most)
            dist.all_gather(list(rows), padded)
        found: torch.Tensor = rows.unique()
        return found.masked_select(found != _NO_POSITION)

    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set tensors to their mean over the ranks, by one all-reduce."""
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        claim(flat, "gradients")
        # Divided before the sum, which then has the range of one gradient.
        flat.div_(dist.get_world_size())
        with self._heartbeat.guard("averaging the gradients of the deltas"):
            dist.all_reduce(flat)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def enter(self, updates: int) -> None:
        """Note that this rank works on the update after so many."""
        self._updates = updates
        self._heartbeat.enter(updates, "training")

    def compare(self, updates: int, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """Check that all ranks hold the same."""
        self._heartbeat.compare(
            {"updates": updates, "the positions of the trained weights": digest(fingerprint)},
            Header(Stage.COMPARING, updates),
        )


def _named(key: ChunkKey) -> str:
    return "no tensor, at the end of a backward" if key == NOWHERE else f"tensor {key.weight}"
