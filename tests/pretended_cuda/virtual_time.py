"""The time that a card would take for what runs on the pretended device.

Each stream and the host have a time. An operator starts when its stream is free, its inputs' events have come and the
host has launched it. It then takes a card's seconds for its bytes or its floating-point operations. All streams share
one compute engine and one copy engine for each direction of the bus; an engine that is free earlier is used earlier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tests.pretended_cuda.detector import Detector, stream_named  # isort: skip  # before torch
from torch.utils.flop_counter import flop_registry

from tests.pretended_cuda.accesses import COPIES, Access, Call, Span, tensors_in
from tests.pretended_cuda.library import Entry, Kind

_LAUNCHES_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view"}
)
_READS_ROWS = frozenset({"embedding", "index_select", "gather", "index"})
"""Operators that read as many bytes of their first input as they write."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card does in a second."""

    flops: float
    memory_bandwidth: float
    """Bytes/s, reads and writes together."""
    bus_bandwidth: float
    """Bytes/s in each direction."""
    launch_seconds: float = 5e-6
    """Seconds of the host for each operator."""
    cache_bytes: int = 0
    """Size of the L2 cache."""
    cache_bandwidth: float = float("inf")


class _Engine:
    """Part of a card that does one thing at a time: its multiprocessors, or a copy engine.

    Attributes:
        busy_seconds: In all.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._busy: list[tuple[float, float]] = []

    def run(self, ready: float, seconds: float) -> float:
        """Work in the first gap from `ready` on, and return the end."""
        if not seconds:
            return ready
        start, place = ready, max(0, bisect_left(self._busy, (ready, ready)) - 1)
        while place < len(self._busy) and start + seconds > self._busy[place][0]:
            start = max(start, self._busy[place][1])
            place += 1
        self._insert(start, start + seconds)
        self.busy_seconds += seconds
        return start + seconds

    def _insert(self, start: float, end: float) -> None:
        place = bisect_left(self._busy, (start, end))
        if place < len(self._busy) and self._busy[place][0] == end:
            end = self._busy.pop(place)[1]
        if place and self._busy[place - 1][1] == start:
            place -= 1
            start = self._busy.pop(place)[0]
        self._busy.insert(place, (start, end))


class VirtualTime(Detector):
    """A detector that tells the time, too. `query()`, which the package never calls, would count as a wait.

    Args:
        card: Whose time it is.

    Attributes:
        host: Seconds at which the host is.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card
        self.host = 0.0
        self._streams: Counter[str] = Counter()
        self._at_event: dict[int, float] = {}
        self._engines: dict[str, _Engine] = {}
        self._cached: OrderedDict[int, int] = OrderedDict()

    def of_stream(self, stream: int = 0, device: int = 0) -> float:
        """Seconds at which a stream has done all that it was given so far."""
        self.catch_up()
        return max(self._streams[stream_named(device, stream)], self.host)

    def busy_seconds(self, kind: str, device: int = 0) -> float:
        """Seconds of an engine's work: "computation", "inbound" or "outbound"."""
        return self._engine(kind, stream_named(device, 0)).busy_seconds

    def _engine(self, kind: str, stream: str) -> _Engine:
        return self._engines.setdefault(f"{kind} of {stream.rpartition(' ')[2]}", _Engine())

    def _take(self, entry: Entry) -> None:
        super()._take(entry)
        stream, event = stream_named(entry.device, entry.stream), entry.first
        if entry.kind == Kind.RECORD:
            self._at_event[event] = max(self._streams[stream], self.host)
        elif entry.kind == Kind.BLOCK:
            self._streams[stream] = max(self._streams[stream], self._at_event.get(event, 0.0))
        elif entry.kind == Kind.WAIT_EVENT:
            self.host = max(self.host, self._at_event.get(event, 0.0))
        elif entry.kind == Kind.WAIT_STREAM:
            self.host = max(self.host, self._streams[stream])
        elif entry.kind == Kind.WAIT_DEVICE:
            ends = [end for name, end in self._streams.items() if name.endswith(f"of cuda:{entry.device}")]
            self.host = max([self.host, *ends])
        elif entry.kind == Kind.ALLOCATE:
            self._hold(entry.first, entry.second)
        elif entry.kind == Kind.FREE:
            self._cached.pop(entry.first, None)

    def _send(self, span: Span, stream: str, *, arrives: bool) -> None:
        """Let a copy arrive at once: to hold it back takes time, and finds nothing that has to do with time."""

    def host_waits(self, stream: str) -> None:
        """Let the host wait for a stream."""
        super().host_waits(stream)
        self.host = max(self.host, self._streams[stream])

    def note_work(self, stream: str, call: Call, touched: list[Access]) -> None:
        """Let an operator take its time."""
        if call.name in _LAUNCHES_NOTHING:
            return
        hosts = [each for each in touched if each.device < 0 and each.tensor.numel()]
        if call.name in COPIES and hosts:
            kind = "outbound" if any(each.written for each in hosts) else "inbound"
            seconds = sum(each.tensor.nbytes for each in hosts) / self._card.bus_bandwidth
        else:
            kind, seconds = "computation", self._computes(call, touched)
        self.host += self._card.launch_seconds
        ready = max(self._streams[stream], self.host)
        self._streams[stream] = self._engine(kind, stream).run(ready, seconds)

    def _computes(self, call: Call, touched: list[Access]) -> float:
        formula: Callable[..., int] | None = flop_registry.get(call.func.overloadpacket)
        num_operations = 0 if formula is None else formula(*call.args, **call.kwargs, out_val=call.out)
        given = tensors_in([*call.args, *call.kwargs.values()])
        by_bytes = 0.0
        for place, each in enumerate(touched):
            tensor = each.tensor
            if each.device < 0 or not tensor.numel():
                continue
            storage_bytes = tensor.untyped_storage().nbytes()
            num_bytes = min(tensor.nbytes, storage_bytes)
            if call.name in _READS_ROWS and not place:
                num_bytes = sum(result.nbytes for result in tensors_in(call.out))
            if each.written and call.name not in COPIES and any(tensor is other for other in given):
                num_bytes *= 2  # read and written
            bandwidth = self._card.memory_bandwidth
            if self._hold(each.storage, storage_bytes):
                bandwidth = self._card.cache_bandwidth
            by_bytes += num_bytes / bandwidth
        return max(num_operations / self._card.flops, by_bytes)

    def _hold(self, start: int, num_bytes: int) -> bool:
        """Take memory into the cache, which forgets what was used longest ago; whether it was there already."""
        room = self._card.cache_bytes // 4  # the rest is for what passes
        if num_bytes > room:
            return False
        was_there = self._cached.pop(start, None) is not None
        self._cached[start] = num_bytes
        while sum(self._cached.values()) > room:
            self._cached.popitem(last=False)
        return was_there
