"""A streamer of weights as it could be at best: two buffers, all other blocks resident, copies beside the computation.

A streamed unit is brought into a buffer as soon as one is free, in the order in which the steps come to the units, and
what still lies in a buffer is not brought again. What trains has a third buffer of its own from its forward to the end
of its step, and goes back then; in other turns that serves, too. All uses are known from the beginning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weight_moments import Moment

from slivertune.planning.schedule import Begin, Entry, Record, Transfer, Wait

NUM_BUFFERS = 3
"""Two through which weights pass, and that of what trains."""


def spread(num_units: int, num_streamed: int) -> frozenset[int]:
    """Streamed units, as evenly among all as can be, so that the bus is at work beside all of the computation."""
    return frozenset((2 * index + 1) * num_units // (2 * num_streamed) for index in range(num_streamed))


def lowest(num_units: int, num_streamed: int) -> frozenset[int]:
    """Streamed units at the bottom, which the fewest backward passes come to."""
    return frozenset(range(num_streamed))


@dataclass(slots=True)
class _Buffer:
    unit: int = -1
    free_after: int | None = None
    """The event from which on its memory may be written; None from the beginning."""
    num_pending: int = 0
    """Uses to come for which its unit is there, or on its way."""


@dataclass(slots=True)
class _Use:
    """Of a unit in a pass; of what trains, from its forward to the end of its step."""

    unit: int
    begins: int
    """The mark before it."""
    ends: int | None
    """The mark after it; None where its step ends it."""
    buffer: _Buffer | None = None
    ready: int | None = None
    """The event that it waits for."""


class _Streamer:
    def __init__(self, uses: Sequence[_Use], unit_bytes: Sequence[int], first_event: int) -> None:
        self._uses, self._bytes, self._event = list(uses), unit_bytes, first_event
        self._num_assigned = 0
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._beginning = {use.begins: use for use in uses}
        self._ending = {use.ends: use for use in uses if use.ends is not None}
        self._training: _Use | None = None

    def load_ahead(self) -> list[Entry]:
        entries: list[Entry] = []
        while self._num_assigned < len(self._uses):
            use = self._uses[self._num_assigned]
            use.buffer = next((each for each in self._buffers if each.unit == use.unit), None)
            if use.buffer is None:
                free = [each for each in self._buffers if not each.num_pending]
                if not free:
                    break
                use.buffer = max(free, key=self._next_use)
                entries += self._load(use, use.buffer)
            use.buffer.num_pending += 1
            self._num_assigned += 1
        return entries

    def before(self, mark: int) -> list[Entry]:
        use = self._beginning.get(mark)
        if use is None:
            return []
        assert use.buffer is not None, "there is always a buffer for the next use"
        if use.ends is None:
            self._training = use
        return [] if use.ready is None else [Wait("computing", use.ready)]

    def after(self, mark: int) -> list[Entry]:
        use = self._ending.get(mark)
        return [] if use is None else self._free(use, mark)

    def end_step(self) -> list[Entry]:
        """Take what was trained back."""
        use, self._training = self._training, None
        if use is None:
            return []
        self._event += 2
        return [
            Record("computing", self._event - 1),
            Wait("outbound", self._event - 1),
            Transfer("outbound", "outbound", self._bytes[use.unit]),
            Record("outbound", self._event),
            *self._free(use, self._event),
        ]

    def _load(self, use: _Use, buffer: _Buffer) -> list[Entry]:
        self._event += 1
        use.ready, buffer.unit = self._event, use.unit
        waits: list[Entry] = [] if buffer.free_after is None else [Wait("inbound", buffer.free_after)]
        return [*waits, Transfer("inbound", "inbound", self._bytes[use.unit]), Record("inbound", self._event)]

    def _free(self, use: _Use, event: int) -> list[Entry]:
        assert use.buffer is not None
        use.buffer.num_pending -= 1
        use.buffer.free_after = event
        return self.load_ahead()

    def _next_use(self, buffer: _Buffer) -> int:
        coming = range(self._num_assigned, len(self._uses))
        return next((place for place in coming if self._uses[place].unit == buffer.unit), len(self._uses))


def with_streamer(
    entries: Sequence[Entry], moments: Mapping[int, Moment], unit_bytes: Sequence[int], streamed: frozenset[int]
) -> list[Entry]:
    """A recorded schedule with copies of weights added.

    Args:
        entries: Of HiFT on one device, with marks.
        moments: By number of a mark.
        unit_bytes: Bytes of each unit's weights.
        streamed: Units whose weights wait on the host.
    """
    last = max((each.event for each in entries if isinstance(each, Record)), default=0)
    streamer = _Streamer(_uses(entries, moments, streamed), unit_bytes, last)
    result: list[Entry] = []
    phase = None
    for entry in entries:
        if isinstance(entry, Begin):
            added = streamer.end_step() if phase == "step" else streamer.load_ahead() if phase is None else []
            result += [entry, *added]
            phase = entry.phase
            continue
        mark = entry.event if isinstance(entry, Record) else -1
        result += [*streamer.before(mark), entry, *streamer.after(mark)]
    return result


def _uses(entries: Sequence[Entry], moments: Mapping[int, Moment], streamed: frozenset[int]) -> list[_Use]:
    found: list[_Use] = []
    of_step: list[_Use] = []
    for entry in entries:
        if isinstance(entry, Begin) and entry.phase == "step":
            found += of_step
            of_step = []
        moment = moments.get(entry.event) if isinstance(entry, Record) else None
        if moment is None or moment.unit not in streamed:
            continue
        assert isinstance(entry, Record)
        if moment.kind.endswith("begins"):
            of_step.append(_Use(moment.unit, entry.event, None))
            continue
        use = next(each for each in reversed(of_step) if each.unit == moment.unit)
        use.ends = entry.event
        if moment.gradient_bytes:
            own = [each for each in of_step if each.unit == moment.unit]
            own[0].ends = None
            of_step = [each for each in of_step if each not in own[1:]]
    return found
