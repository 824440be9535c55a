"""SFT's collectives over torch.distributed: small all-reduces and all-gathers, none as large as a dense gradient.

The deltas' gradients are averaged over the ranks. Single entries of sharded pretrained values are read and written.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.hyperparameters import own_hyperparameters
from slivertune.core.ledger import claim
from slivertune.deltas.delta import write_flat
from slivertune.parallel.consistency.headers import Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat, comparable, digest, guard
from slivertune.sft import SFT
from slivertune.sft.communicator import NOWHERE, ChunkKey, Communicator
from slivertune.sft.targets import Target
from slivertune.sft.weight import PretrainedValues, bits_differ

_NO_POSITION = -1


class RankCommunicator(Communicator):
    """Collectives over the default process group.

    Each rank contributes 4 bytes per trained weight and update, 8 in an estimation phase. In a phase's first update,
    each micro-batch adds 8 bytes, and 4 bytes per rank (positions, then the values at all ranks' positions).

    Args:
        is_last: Whether the running backward is the last one before the update; the same on every rank.
    """

    is_alone = False

    def __init__(self, is_last: Callable[[], bool]) -> None:
        self._is_last = is_last
        self._heartbeat = Heartbeat("sft")
        self._heartbeat.enter(0, "before its first update")
        self._updates = 0
        self._sft: SFT | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files that all ranks share."""
        return dist.get_rank() == 0

    def check(self) -> None:
        """Accept any number of ranks: they are connected."""

    def is_last(self) -> bool:
        """Return whether the running backward is the last one before the update."""
        return self._is_last()

    def meet(self, stage: Stage = Stage.GRADIENT_SYNC, settings: Mapping[str, object] | None = None) -> None:
        """Check that all ranks are about to begin the same stage, at the same update and with the same settings."""
        self._heartbeat.meet(Header(stage, self._updates), settings)

    def keep_together(self, sft: SFT) -> None:
        """Compare the ranks' positions and settings before every step from now on.

        Args:
            sft: SFT that uses this communicator.
        """
        self._sft = sft

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._updates = sft.updates  # a checkpoint may have been loaded
            settings = {key: comparable(each) for key, each in own_hyperparameters(sft.param_groups[0]).items()}
            self.meet(Stage.STEPPING, settings)

        sft.register_step_pre_hook(before)

    def compare_all(self) -> None:
        """Compare positions and deltas at any point of the phases, after `keep_together`. A collective.

        Raises:
            RuntimeError: On every rank, if the ranks have diverged.
        """
        sft = self._sft
        assert sft is not None
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
        """Return the earliest of all ranks' chunks, in the order of `ChunkKey.order`. A collective."""
        own = torch.tensor(key, dtype=torch.int64, device=device)
        with self._heartbeat.guard(f"choosing candidates in {_named(key)}"):
            rows = own.new_empty(dist.get_world_size(), own.numel())
            dist.all_gather(list(rows), own)
            places = rows.tolist()
        return min((ChunkKey(*each) for each in places), key=ChunkKey.order)

    def union(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        """Gather all ranks' positions, each once, sorted. A collective."""
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
        # Divided before the sum, so that the sum has the range of one gradient.
        flat.div_(dist.get_world_size())
        with self._heartbeat.guard("averaging the gradients of the deltas"):
            dist.all_reduce(flat)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def enter(self, updates: int) -> None:
        """Note that this rank has applied so many updates and works on the next."""
        self._updates = updates
        self._heartbeat.enter(updates, "training")

    def compare(self, updates: int, fingerprint: Mapping[str, torch.Tensor]) -> None:
        """Check that all ranks hold the same tensors. A collective."""
        self._heartbeat.compare(
            {"updates": updates, "the positions of the trained weights": digest(fingerprint)},
            Header(Stage.COMPARING, updates),
        )


def _named(key: ChunkKey) -> str:
    return "no tensor, at the end of a backward" if key == NOWHERE else f"tensor {key.weight}"


class ShardedPretrainedValues(PretrainedValues):
    """Reads and writes entries of a tensor whose flattened elements are sharded, one contiguous run per rank.

    Args:
        target: The tensor.
        device: Device of its gradients.
    """

    is_whole = False

    def __init__(self, target: Target, device: torch.device) -> None:
        super().__init__(target)
        self._device = device

    @property
    def device(self) -> torch.device:
        """Device of the tensor's gradients."""
        return self._device

    @abstractmethod
    def own(self) -> tuple[torch.Tensor, int]:
        """Return this rank's elements as a flat view that writes go through, and the position of the first."""

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """Copy entries, in the tensor's dtype. A collective over as many elements."""
        shard, first = self.own()
        part = _within(indices, first, shard.numel())
        values = torch.zeros(indices.numel(), dtype=shard.dtype, device=self._device)
        values[part] = shard.take(_offsets(indices[part], first, shard)).to(self._device)
        # For each byte, one rank has the value and all others have zero.
        with guard(f"reading entries of {self._target.name}"):
            dist.all_reduce(values.view(torch.uint8))
        return values

    def differing(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return which of this rank's entries differ in their bits from these values. A local operation."""
        shard, first = self.own()
        offsets = indices.long() - first
        is_own = (offsets >= 0) & (offsets < shard.numel())
        if not shard.numel():
            return is_own
        present = shard.take(offsets.clamp(0, shard.numel() - 1).to(shard.device)).to(values.device)
        return is_own & bits_differ(present, values)

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries, each on the rank that stores it."""
        shard, first = self.own()
        part = _within(indices, first, shard.numel())
        write_flat(shard, _offsets(indices[part], first, shard), values[part].to(shard.device))


def _within(indices: torch.Tensor, first: int, length: int) -> slice:
    bounds = torch.tensor([first, first + length], device=indices.device)
    start, stop = torch.searchsorted(indices.long(), bounds).tolist()
    return slice(start, stop)


def _offsets(indices: torch.Tensor, first: int, shard: torch.Tensor) -> torch.Tensor:
    return (indices.long() - first).to(shard.device)
