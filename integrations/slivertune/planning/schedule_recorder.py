"""Records the schedule of real training steps: copies, events and waits by their streams, computation by its operators.

What is recorded is the code that trains, on tensors without data: `RecordedStreams` stand in for the copy streams, and
a dispatch mode sees every operator. What would be stored in files lies in host memory. An operator inside of
`on(direction)` is one of that copy stream, any other is computation. Memory that the streams' `host_memory` returned
lies on the host, all other on the device: a copy between the two passes the bus, and what touches host memory alone is
the host's own work and takes no time here.

Not seen: the time that the host takes to queue operators, and reads of tensors without dimensions, which on a plan's
device lie on the host already (a GPU's fused optimizers keep step counts on the device).
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Direction, Event
from slivertune.core.torch_internals import (
    FINDS_DISTINCT_VALUES,
    FLOP_FORMULAS,
    READS_A_VALUE,
    TorchDispatchMode,
    arguments_of,
    is_wrapper_type,
    storage_key,
    tree_leaves,
)
from slivertune.planning.kernels import attention_seen_by
from slivertune.planning.schedule import (
    Access,
    Begin,
    Cost,
    Entry,
    FileTransfer,
    Phase,
    Record,
    Stream,
    Synchronize,
    Transfer,
    Wait,
    Work,
)

_WRITES_NOTHING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_READS_NO_VALUES = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_"}
)
_READS_WHERE_INDICES_SAY = frozenset({"embedding", "index_select", "gather", "index"})
_COPIES = frozenset({"copy_", "_to_copy", "clone"})
_HOST_WAITS = frozenset({READS_A_VALUE, torch.ops.aten.nonzero.default, FINDS_DISTINCT_VALUES})


class ScheduleRecorder(TorchDispatchMode):
    """Writes down what is queued while `recording`.

    Use `streams` as the maker of copy streams (`streams_made_by`) before the optimizer is built.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        """The schedule so far."""
        self._stream: Stream = "computing"
        self._operators: Counter[Cost] = Counter()
        """Of the work that is being gathered: it ends at the next entry of another kind."""
        self._operators_stream: Stream = "computing"
        self._num_events = 0
        self._stream_of: dict[int, Stream] = {}
        """Of events that are in the schedule."""
        self._waited_for: dict[Stream, int] = {}
        """By stream: the last event for which the host has waited."""
        self._num_steps = 0
        self._times = 1
        self._on_host: set[int] = set()
        self._is_recording = False

    def streams(self, device: torch.device) -> CopyStreams:
        """Copy streams that this records."""
        return RecordedStreams(device, self)

    @contextmanager
    def recording(self, phase: Phase, group: int = 0, *, times: int = 1) -> Iterator[None]:
        """Record what runs inside; the first forward after a step begins another.

        Args:
            phase: What it is.
            group: Whose turn it is.
            times: As how many alike it is written down: all its operators and copies that often, one after the other.
        """
        self.add(Begin(self._num_steps, group, phase))
        self._is_recording, self._times = True, times
        try:
            with attention_seen_by(self._work), self:
                yield
        finally:
            self._is_recording = False
            self._close_work()
            self._times = 1
        self._num_steps += phase == "step"

    def add(self, entry: Entry) -> None:
        """Append an entry; consecutive copies are one."""
        self._close_work()
        last = self.entries[-1] if self.entries else None
        if (
            isinstance(entry, Transfer)
            and isinstance(last, Transfer)
            and (last.stream, last.direction) == (entry.stream, entry.direction)
        ):
            self.entries[-1] = Transfer(entry.stream, entry.direction, last.num_bytes + entry.num_bytes)
        else:
            self.entries.append(entry)

    @property
    def num_steps(self) -> int:
        """Steps that were recorded to their end."""
        return self._num_steps

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Take what runs inside as work of a stream."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def record(self, stream: Stream) -> int:
        """Record a new event on a stream; those outside of `recording` have happened when it begins."""
        self._num_events += 1
        if self._is_recording:
            self._stream_of[self._num_events] = stream
            self.add(Record(stream, self._num_events))
        return self._num_events

    def wait(self, stream: Stream, event: int) -> None:
        """Let a stream wait."""
        if self._is_recording:
            self.add(Wait(stream, event))

    def finish(self, event: int) -> None:
        """Let the host wait for an event, or the thread whose work is being taken down."""
        stream = self._stream_of.get(event)
        if stream is None:
            return  # it happened before
        if self._stream in get_args(Access):
            self.wait(self._stream, event)
        elif self._is_recording:
            self.add(Synchronize(stream, event))
            self._waited_for[stream] = max(event, self._waited_for.get(stream, 0))

    def has_finished(self, event: int) -> bool:
        """Whether an event has happened at any rates when the host comes here: it has waited for it, or a later one."""
        stream = self._stream_of.get(event)
        return stream is None or event <= self._waited_for.get(stream, 0)

    def synchronize(self, stream: Stream) -> None:
        """Let the host wait for all that is queued on a stream."""
        if self._is_recording:
            self.add(Synchronize(stream))
            self._waited_for[stream] = self._num_events

    def move_file(self, thread: Access, num_bytes: int) -> None:
        """Let a thread read or write a file."""
        if self._is_recording:
            self.add(FileTransfer(thread, num_bytes))

    def note_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that a tensor's memory is the host's, as long as it lives."""
        storage = tensor.untyped_storage()
        self._on_host.add(storage_key(storage))
        weakref.finalize(storage, self._on_host.discard, storage_key(storage)).atexit = False
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_wrapper_type(each) for each in types):
            return NotImplemented  # what it does inside is what counts
        kwargs = kwargs or {}
        if func in _HOST_WAITS and not self._lies_on_host(args[0]):
            self.synchronize("computing")
        out = func(*args, **kwargs)
        if not func.is_view:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func.overloadpacket.__name__
        if name in _WRITES_NOTHING:
            return
        read, written = _touched(func, name, args, kwargs, out)
        if not written:
            return  # asked for a tensor's form alone, or was a read that the host waits for
        places = {self._lies_on_host(tensor) for tensor in (*read, *written)}
        if name in _COPIES and places == {True, False}:
            self.add(self._transfer(read, written))
            if not _is_non_blocking(func, args, kwargs):
                self.synchronize(self._stream)
            return
        formula = FLOP_FORMULAS.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula is not None else 0
        self._work(flops, sum(_num_bytes(each) for each in (*read, *written) if not self._lies_on_host(each)))

    def _transfer(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> Transfer:
        direction: Direction = "outbound" if self._lies_on_host(written[0]) else "inbound"
        return Transfer(self._stream, direction, self._times * read[0].nbytes)

    def _work(self, flops: int, num_bytes: int) -> None:
        if not flops and not num_bytes:
            return
        if self._stream != self._operators_stream:
            self._close_work()
            self._operators_stream = self._stream
        self._operators[flops, num_bytes] += self._times

    def _close_work(self) -> None:
        if self._operators:
            self.entries.append(Work(self._operators_stream, dict(self._operators)))
            self._operators = Counter()

    def _lies_on_host(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor.untyped_storage()) in self._on_host


class RecordedStreams(CopyStreams):
    """Copy streams whose order a recorder writes down; everything runs at once, in plain order.

    Args:
        device: Where the computation runs.
        recorder: Writes.
    """

    def __init__(self, device: torch.device, recorder: ScheduleRecorder) -> None:
        super().__init__(device)
        self._recorder = recorder

    @override
    @contextmanager
    def on(self, direction: Direction, *after: Event) -> Iterator[None]:
        for event in after:
            if event is not None:
                self._recorder.wait(direction, event)
        with self._recorder.on(direction):
            yield

    @override
    def record(self, direction: Direction | None = None) -> Event:
        return self._recorder.record(direction or "computing")

    @override
    def compute_after(self, event: Event) -> None:
        if event is not None:
            self._recorder.wait("computing", event)

    @override
    def wait_on_host(self, event: Event) -> None:
        if event is not None:
            self._recorder.finish(event)

    @override
    def synchronize(self) -> None:
        self._recorder.synchronize("inbound")
        self._recorder.synchronize("outbound")

    @override
    def host_memory(self, num_bytes: int, *, is_inherited: bool = False) -> torch.Tensor:
        return self._recorder.note_host_memory(torch.empty(num_bytes, dtype=torch.uint8))


def _touched(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for position, (argument, is_written) in enumerate(arguments_of(func)):
        tensors = _tensors(args[position] if position < len(args) else kwargs.get(argument))
        if is_written:
            written += tensors
        if not is_written or (name != "copy_" and argument != "out"):
            read += tensors
    known = {storage_key(each.untyped_storage()) for each in (*read, *written)}
    fresh = [each for each in _tensors(out) if storage_key(each.untyped_storage()) not in known]
    if name in _READS_NO_VALUES:
        read = []
    elif name in _READS_WHERE_INDICES_SAY:
        read = [*read[1:], *fresh]  # as many bytes of the table as come out
    return read, written + fresh


def _is_non_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [name for name, _ in arguments_of(func)]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking"))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]


def _num_bytes(tensor: torch.Tensor) -> int:
    # What is expanded lies in memory once.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
