"""Plays a schedule against the rates of a card, and says how long the computing stream stood still, and for what.

Each stream does one thing at a time, in its order. An operator takes its operations at the card's rate or its bytes at
that of the memory, whichever is longer. Copies that go the same way at once, with half duplex all that go at once,
share the bus evenly; with a bound on the host's memory all are slowed alike to keep within it, and files that are read
or written with them. Reading and writing share the disk evenly, too, unless it has its rate for each. Computation and
copies do not slow each other on the device. The host queues everything at once, but for what it waits for itself.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from slivertune.planning.cards import Duplex, Rates
from slivertune.planning.schedule import (
    Begin,
    Entry,
    FileTransfer,
    Phase,
    Record,
    Schedule,
    Stream,
    Synchronize,
    Transfer,
    Wait,
    Work,
)

Cause = tuple[Phase, str]
"""The phase in which the computing stream stood still; and what it stood still for, from the stream that it waited for
to the one that was at work: `inbound`, or `inbound after outbound` where a load waited for the room that a write-back
was to free; `host after reader` where nothing was queued while the host waited for a file."""


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """What an update took on the computing stream, in seconds; or a mean of several."""

    seconds: Mapping[Phase, float]
    """By phase: from its first operator's turn to that of the next phase's, or to the last one's end."""
    exposed_by: Mapping[Cause, float]
    """How long the computing stream stood still, by cause."""

    @property
    def total(self) -> float:
        """How long it took."""
        return sum(self.seconds.values())

    @property
    def exposed(self) -> float:
        """How long the computing stream stood still."""
        return sum(self.exposed_by.values())


@dataclass(frozen=True, slots=True)
class StepTime(UpdateTime):
    """Of one step of a schedule."""

    step: int
    """Number of the step."""
    group: int
    """Index of the group that trained."""


def exposed_share(times: Iterable[UpdateTime]) -> float:
    """The part of steps' time in which the computing stream stood still."""
    times = list(times)
    return sum(each.exposed for each in times) / sum(each.total for each in times)


def mean_update(schedule: Schedule, rates: Rates) -> UpdateTime:
    """What an update of a run takes on a card, in the mean over all of them.

    Args:
        schedule: Of the run.
        rates: The card's.
    """
    seconds: defaultdict[Phase, float] = defaultdict(float)
    exposed_by: defaultdict[Cause, float] = defaultdict(float)
    for step in play(schedule.entries, rates):
        share = schedule.shares.get(step.step, 0.0)
        for phase, value in step.seconds.items():
            seconds[phase] += share * value
        for cause, value in step.exposed_by.items():
            exposed_by[cause] += share * value
    return UpdateTime(dict(seconds), dict(exposed_by))


def play(entries: Sequence[Entry], rates: Rates) -> list[StepTime]:
    """Play a schedule.

    Write-backs run under the next step: what the first steps take depends on what came before the schedule, which
    is taken to be done, and the last step ends with its computation.

    Args:
        entries: In the host's order; the first begins a step.
        rates: The card's.

    Returns:
        Each step's time, in order.

    Raises:
        ValueError: If the schedule does not begin with a step, or can't end: a stream waits for what comes after it.
    """
    if not entries or not isinstance(entries[0], Begin):
        raise ValueError(
            "a schedule must begin with the beginning of a step; record it with ScheduleRecorder.recording"
        )
    player = _Player(entries, rates)
    player.run()
    return player.times()


@dataclass(slots=True)
class _StreamState:
    queue: deque[Entry] = field(default_factory=deque)
    running: Work | Transfer | FileTransfer | None = None
    rest: float = 0.0
    """Of what is running: seconds of work, bytes of a transfer."""

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.queue


class _Player:
    def __init__(self, entries: Sequence[Entry], rates: Rates) -> None:
        self._rates = rates
        self._to_queue = deque(entries)
        self._streams: dict[Stream, _StreamState] = {name: _StreamState() for name in get_args(Stream)}
        self._recorded_by: dict[int, Stream] = {each.event: each.stream for each in entries if isinstance(each, Record)}
        self._happened: set[int] = set()
        first = entries[0]
        assert isinstance(first, Begin)
        self._current = first
        self._steps: dict[int, int] = {}
        self._seconds: defaultdict[int, defaultdict[Phase, float]] = defaultdict(lambda: defaultdict(float))
        self._exposed: defaultdict[int, defaultdict[Cause, float]] = defaultdict(lambda: defaultdict(float))

    def run(self) -> None:
        while True:
            while self._queue_more() or self._start():
                pass
            if self._streams["computing"].is_idle and not self._to_queue:
                return
            self._advance()

    def times(self) -> list[StepTime]:
        return [
            StepTime(dict(self._seconds[step]), dict(self._exposed[step]), step, group)
            for step, group in self._steps.items()
        ]

    def _queue_more(self) -> bool:
        """Let the host queue what it can; whether it did."""
        before = len(self._to_queue)
        while self._to_queue:
            entry = self._to_queue[0]
            if isinstance(entry, Synchronize):
                if self._is_waited_for(entry):
                    break
            else:
                self._streams["computing" if isinstance(entry, Begin) else entry.stream].queue.append(entry)
            self._to_queue.popleft()
        return len(self._to_queue) < before

    def _start(self) -> bool:
        """Take from the queues what takes no time, and start what does; whether there was any."""
        before = sum(len(stream.queue) for stream in self._streams.values())
        for stream in self._streams.values():
            while stream.queue and stream.running is None:
                entry = stream.queue[0]
                if isinstance(entry, Wait):
                    if self._is_ahead(entry.event):
                        break
                elif isinstance(entry, Record):
                    self._happened.add(entry.event)
                elif isinstance(entry, Begin):
                    self._current = entry
                    self._steps[entry.step] = entry.group
                elif isinstance(entry, Work):
                    stream.running, stream.rest = entry, self._duration(entry)
                elif isinstance(entry, Transfer | FileTransfer):
                    stream.running, stream.rest = entry, entry.num_bytes
                stream.queue.popleft()
        return sum(len(stream.queue) for stream in self._streams.values()) < before

    def _is_waited_for(self, entry: Synchronize) -> bool:
        return not self._streams[entry.stream].is_idle if entry.event is None else self._is_ahead(entry.event)

    def _is_ahead(self, event: int) -> bool:
        return event in self._recorded_by and event not in self._happened

    def _duration(self, work: Work) -> float:
        is_fused = self._rates.is_compiled and work.stream == "computing" and self._current.phase != "step"
        return sum(
            count * max(flops / self._rates.flops, num_bytes / self._rates.memory_bandwidth)
            for (flops, num_bytes), count in work.operators.items()
            if flops or not is_fused
        )

    def _advance(self) -> None:
        """Go on to the next moment at which something ends."""
        speeds = self._speeds()
        if not speeds:
            heads = {name: stream.queue[0] for name, stream in self._streams.items() if stream.queue}
            raise ValueError(f"the schedule can't end: {heads} wait for each other, or the host for them")
        ends = {name: self._streams[name].rest / speed for name, speed in speeds.items()}
        seconds = min(ends.values())
        step = self._current.step
        self._seconds[step][self._current.phase] += seconds
        if self._streams["computing"].running is None:
            self._exposed[step][self._current.phase, self._cause()] += seconds
        for name, speed in speeds.items():
            stream = self._streams[name]
            stream.rest -= seconds * speed
            if ends[name] == seconds:
                stream.running = None

    def _speeds(self) -> dict[Stream, float]:
        """By stream that is at work: how much of what it runs is done in a second."""
        running = {name: stream.running for name, stream in self._streams.items() if stream.running is not None}
        ways = {name: each.direction for name, each in running.items() if isinstance(each, Transfer)}
        files = {name: name for name, each in running.items() if isinstance(each, FileTransfer)}
        rates = self._rates
        speeds: dict[Stream, float] = dict.fromkeys(running, 1.0)
        speeds |= _shared(rates.bus_bandwidth, ways, rates.duplex) | _shared(
            rates.disk_bandwidth, files, rates.disk_duplex
        )
        total = sum(speeds[name] for name in (*ways, *files))
        if rates.host_bandwidth is not None and total > rates.host_bandwidth:
            for name in (*ways, *files):
                speeds[name] *= rates.host_bandwidth / total
        return speeds

    def _cause(self) -> str:
        """What the computing stream stands still for."""
        computing = self._streams["computing"]
        if not computing.queue:
            # The host waits, and has queued nothing more.
            host_waits_for = self._to_queue[0]
            assert isinstance(host_waits_for, Synchronize)
            return f"host after {self._behind(host_waits_for.stream)}"
        return self._behind("computing").removeprefix("computing after ")

    def _behind(self, name: Stream) -> str:
        """A stream, and those that it waits for, down to one that is at work."""
        stream = self._streams[name]
        if stream.running is not None:
            return name
        if not stream.queue:
            return f"{name} after host"
        head = stream.queue[0]
        assert isinstance(head, Wait)
        return f"{name} after {self._behind(self._recorded_by[head.event])}"


def _shared(bandwidth: float, ways: Mapping[Stream, str], duplex: Duplex) -> dict[Stream, float]:
    """What each stream gets of a bandwidth that those of one way share, or with half duplex all."""
    return {
        name: bandwidth / sum(duplex == "half" or other == way for other in ways.values()) for name, way in ways.items()
    }
