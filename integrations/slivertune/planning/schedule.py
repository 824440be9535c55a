"""A schedule: what a run's host queues on the streams of a device and on the threads of its files, in its order.

Recorded once, played on any card.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slivertune.core.copy_streams import Direction

Phase = Literal["forward", "backward", "step"]
Access = Literal["reader", "writer"]
"""The threads that read and write files."""
Stream = Literal["computing", "inbound", "outbound", Access]
"""The device's own stream, its two copy streams, and the threads, which do one thing after the other as streams do."""
Cost = tuple[int, int]
"""Of an operator: floating-point operations, and bytes of the device's memory that it reads and writes."""


@dataclass(frozen=True, slots=True)
class Begin:
    """From here on the host queues a phase of a step."""

    step: int
    """Number of the step, from 0."""
    group: int
    """Index of the group that trains."""
    phase: Phase


@dataclass(frozen=True, slots=True)
class Work:
    """Operators on the device's memory, one after the other."""

    stream: Stream
    operators: Mapping[Cost, int]
    """How many there are of each cost."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies between host and device, one after the other."""

    stream: Stream
    direction: Direction
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """A file that is read to the host's memory or written from there."""

    stream: Access
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """An event that happens when all that was queued on a stream before is done."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """What is queued on a stream from here on starts after an event; one that is recorded nowhere has happened."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host queues nothing more until all that was queued on a stream is done, or an event of it has happened."""

    stream: Stream
    event: int | None = None
    """One that is recorded nowhere has happened."""


Entry = Begin | Work | Transfer | FileTransfer | Record | Wait | Synchronize


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Steps of a run, in the host's order, and which of all its updates they stand for."""

    entries: Sequence[Entry]
    """What is queued; the first begins a step."""
    shares: Mapping[int, float]
    """By number of a step: the share of the run's updates that are like it; 1 together. Steps without one come before
    those that count, and leave what these meet."""

    def mean_of_operators(self, of_one: Callable[[Cost], float]) -> float:
        """A sum over the operators of an update, in the mean over the run's.

        Args:
            of_one: What an operator adds.
        """
        total, share = 0.0, 0.0
        for entry in self.entries:
            if isinstance(entry, Begin):
                share = self.shares.get(entry.step, 0.0)
            elif isinstance(entry, Work):
                total += share * sum(of_one(cost) * count for cost, count in entry.operators.items())
        return total
