"""Reports what a real device would do wrong in rare moments: accesses that nothing orders, and waits of the host.

Each stream of a device and each thread of the host has a vector clock: how far it has seen each of the others. An
operator counts as one of the stream on which it is queued, and comes after what its thread has seen. Events, waits and
tasks of threads carry clocks. Two accesses to the same bytes, of which one writes, must be ordered by them.

What the clocks can't see is shown by the bytes: a copy into pinned host memory arrives when something waits for it,
and holds a pattern until then; the source of a copy to the device must still be the same when the copy is known to
have ended. So a file, a mapping or numpy that comes too early shows, too.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tests.pretended_cuda.torch_cuda as torch_cuda  # isort: skip  # before torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import slivertune
from tests.helpers.mapped_pages import is_mapped
from tests.pretended_cuda.accesses import (
    COPIES,
    PLAIN,
    Access,
    Call,
    Span,
    access,
    operator_of,
    overlap,
    reads_size,
    tensors_in,
)
from tests.pretended_cuda.host_calls import patched
from tests.pretended_cuda.library import Entry, Kind
from tests.pretended_cuda.torch_cuda import LIBRARY

Clock = dict[str, int]
"""Number of accesses by stream or thread."""
HOST = "the host"
_POISON = 0xFE
_HIDDEN = tuple(str(Path(__file__).parent / name) for name in ("detector", "host_calls", "torch_cuda", "collectives"))
_PACKAGE = f"{Path(slivertune.__file__).parent}/"


class Memory:
    """What happened to one allocation, or one pinned range of the host.

    Args:
        owner: The stream that allocated it, or `HOST`.
        start: First address.
        num_bytes: Size.
        is_ours: Whether it was registered by a call; torch keeps its own pinned memory until copies have ended.
    """

    def __init__(self, owner: str, start: int, num_bytes: int, *, is_ours: bool = False) -> None:
        self.owner, self.start, self.num_bytes, self.is_ours = owner, start, num_bytes, is_ours
        self.touched: dict[str, dict[tuple[Span, bool], int]] = {}
        self.last: Clock = {}
        self.kept_for: set[str] = set()


@dataclass(eq=False)
class _InFlight:
    """A copy between pinned host memory and the device of which the host does not know that it has ended."""

    actor: str
    when: int
    span: Span
    content: bytes
    arrives: bool
    """Whether it writes the host's memory."""
    where: str


class Detector(TorchDispatchMode):
    """Notes what is done on the pretended device while it is entered.

    Attributes:
        races: Accesses that nothing orders, and memory released while it is used, with where they were seen.
        unpinned: Copies that were asked not to wait, of host memory that is not pinned, by line.
        waits: Waits of the host, by line.
        num_on_autograd_threads: Operators on the device that autograd's threads ran.
        collectives: Those of the devices' group, by line.
        copied_bytes: By (direction, stream); directions are "inbound" (to the device) and "outbound".
        registered_bytes: Host memory that the package pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: Counter[str] = Counter()
        self.unpinned: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.num_on_autograd_threads = 0
        self.collectives: Counter[str] = Counter()
        self.copied_bytes: Counter[tuple[str, str]] = Counter()
        self.registered_bytes = 0
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._threads: dict[int, str] = {}
        self._events: dict[int, Clock] = {}
        self._device: dict[int, Memory] = {}
        self._pinned: dict[int, Memory] = {}
        self._pinned_starts: list[int] = []
        self._released: dict[str, list[Memory]] = {}
        self._in_flight: list[_InFlight] = []
        self.is_entered = False
        self._modes = threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Save the wrapper that torch puts around each operator's call for the sake of compiled code."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled meanwhile; its operators are seen where the backend runs them one by one."""
        return True

    def __enter__(self) -> Detector:
        LIBRARY.pretended_log(1)
        for start, num_bytes in torch_cuda.registered_ranges():
            self._register(start, num_bytes, is_ours=True)
        torch_cuda.after_wait.append(self._after_wait)
        torch_cuda.before_unregistering.append(self.catch_up)
        torch_cuda.after_collective.append(self._note_collective)
        self._patches = patched(self)
        self._patches.__enter__()
        super().__enter__()
        self.is_entered = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_entered = False
        super().__exit__(*error)
        self._patches.__exit__(None, None, None)
        torch_cuda.after_wait.remove(self._after_wait)
        torch_cuda.before_unregistering.remove(self.catch_up)
        torch_cuda.after_collective.remove(self._note_collective)
        self.catch_up()
        for copy in [*self._in_flight]:
            self._finish(copy)
        unmapped = [each for each in self._pinned.values() if not is_mapped(each.start)]
        self.catch_up()  # with what was collected meanwhile
        for memory in [each for each in unmapped if self._pinned.get(each.start) is each]:
            self.races["host memory is unmapped while it is registered"] += 1
            torch_cuda.Runtime().cudaHostUnregister(memory.start)
        LIBRARY.pretended_log(0)

    def side_copies(self) -> dict[str, int]:
        """Bytes copied on other streams than a device's first, by direction."""
        side = {key: size for key, size in self.copied_bytes.items() if not key[1].startswith("stream 0 ")}
        return {way: sum(size for (own, _), size in side.items() if own == way) for way in ("inbound", "outbound")}

    # ---- Clocks

    def actor(self) -> str:
        """This thread; autograd's count as the main one."""
        return self._threads.get(LIBRARY.pretended_thread(), HOST)

    def clock(self, actor: str) -> Clock:
        """How far a stream or thread has seen the others."""
        return self._clocks.setdefault(actor, {})

    def catch_up(self) -> None:
        """Take what the device has logged."""
        with self._lock:
            # Of its own for each call: what is taken here may collect garbage, whose end takes more.
            entries = (Entry * 16)()
            while count := LIBRARY.pretended_take(entries, len(entries)):
                for place in range(count):
                    self._take(entries[place])

    def _take(self, entry: Entry) -> None:
        kind = entry.kind
        if kind == Kind.ALLOCATE:
            self._allocate(entry.first, entry.second, stream_named(entry.device, entry.stream), self._thread(entry))
        elif kind == Kind.FREE:
            memory = self._device.pop(entry.first, None)
            if memory is not None and memory.last:
                self._released.setdefault(memory.owner, []).append(memory)
        elif kind == Kind.RECORD:
            clock = self.clock(stream_named(entry.device, entry.stream))
            _advance(clock, self.clock(self._thread(entry)))
            self._events[entry.first] = clock.copy()
        elif kind == Kind.BLOCK:
            _advance(self.clock(stream_named(entry.device, entry.stream)), self._events.get(entry.first, {}))
        elif kind == Kind.WAIT_EVENT:
            self._let_wait(self._thread(entry), self._events.get(entry.first, {}))
        elif kind == Kind.WAIT_STREAM:
            self._let_wait(self._thread(entry), self.clock(stream_named(entry.device, entry.stream)))
        elif kind == Kind.WAIT_DEVICE:
            for actor in [name for name in self._clocks if name.endswith(f"of cuda:{entry.device}")]:
                self._let_wait(self._thread(entry), self.clock(actor))
        elif kind == Kind.KEEP_FOR:
            if (memory := self._device.get(entry.first)) is not None:
                memory.kept_for.add(stream_named(entry.device, entry.stream))
        elif kind == Kind.REGISTER:
            self._register(entry.first, entry.second, is_ours=bool(entry.device))
            self.registered_bytes += entry.second * bool(entry.device)
        elif kind == Kind.UNREGISTER:
            self._unregister(entry.first, self._thread(entry), looks_after_itself=bool(entry.second))

    def _thread(self, entry: Entry) -> str:
        return self._threads.get(entry.thread, HOST)

    def _let_wait(self, thread: str, record: Clock) -> None:
        _advance(self.clock(thread), record)
        self._finish_known(self.clock(thread))

    def _after_wait(self) -> None:
        self.catch_up()
        self.waits[_where()] += 1

    # ---- Memory

    def _allocate(self, start: int, num_bytes: int, owner: str, thread: str) -> None:
        """Give memory to a stream, which may be any that was released on it."""
        clock = self.clock(owner).copy()
        _advance(clock, self.clock(thread))
        for memory in self._released.pop(owner, ()):
            for other, last in memory.last.items():
                if other != owner and other not in memory.kept_for and clock.get(other, 0) < last:
                    self.races[f"memory of {owner} is used again while {other} may still use it"] += 1
        self._device[start] = Memory(owner, start, num_bytes)

    def _register(self, start: int, num_bytes: int, *, is_ours: bool) -> None:
        self._pinned[start] = Memory(HOST, start, num_bytes, is_ours=is_ours)
        self._pinned_starts = sorted(self._pinned)

    def _unregister(self, start: int, thread: str, *, looks_after_itself: bool) -> None:
        memory = self._pinned.pop(start, None)
        self._pinned_starts = sorted(self._pinned)
        if memory is None:
            return
        span = start, start + memory.num_bytes
        self._in_flight = [copy for copy in self._in_flight if not overlap(copy.span, span)]
        if looks_after_itself:
            return
        clock = self.clock(thread)
        for other, last in memory.last.items():
            # A thread that uses it holds it, or reads memory that is not pinned any more, which is slower alone.
            if other.startswith("stream ") and clock.get(other, 0) < last:
                self.races[f"host memory is unregistered while {other} may still use it"] += 1

    def _memory_of(self, touched: Access) -> Memory | None:
        if touched.device < 0:
            return self._pinned_at(touched.span[0])
        start = touched.storage
        memory = self._device.get(start)
        if memory is None and start:  # allocated before the detector was entered
            owner = stream_named(touched.device, 0)
            memory = self._device[start] = Memory(owner, start, touched.tensor.untyped_storage().nbytes())
        return memory

    def _pinned_at(self, address: int) -> Memory | None:
        place = bisect_right(self._pinned_starts, address)
        if not place:
            return None
        memory = self._pinned[self._pinned_starts[place - 1]]
        return memory if address < memory.start + memory.num_bytes else None

    # ---- Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types):
            # A subclass unwraps first, and what it does inside is seen then; a fake tensor has no memory.
            return func(*args, **kwargs) if FakeTensor in types else NotImplemented
        operator = operator_of(func)
        if operator.is_view:
            return func(*args, **kwargs)
        inputs = [
            access(tensor, written)
            for position, name, written in operator.arguments
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name))
        ]
        if self._in_flight:
            with self._lock:
                self.catch_up()
                self._let_arrive(inputs)
        out = func(*args, **kwargs)
        with self._lock:
            self.catch_up()
            # What is written may lie elsewhere now.
            inputs = [access(each.tensor, True) if each.written else each for each in inputs]
            self._note_operator(Call(func, operator, args, kwargs, out), inputs)
        return out

    def _let_arrive(self, inputs: list[Access]) -> None:
        """Finish the copies that touch the same bytes as an operator and are ordered before it."""
        clock: Clock | None = None
        for span in [each.span for each in inputs if each.device < 0]:
            for copy in [each for each in self._in_flight if overlap(each.span, span)]:
                clock = clock or self._clock_of_next(inputs)
                if clock.get(copy.actor, 0) >= copy.when:
                    self._finish(copy)

    def _clock_of_next(self, inputs: list[Access]) -> Clock:
        clock = self.clock(self.actor()).copy()
        for index in {each.device for each in inputs if each.device >= 0}:
            _advance(clock, self.clock(stream_named(index, LIBRARY.pretended_stream(index))))
        return clock

    def _note_operator(self, call: Call, inputs: list[Access]) -> None:
        storages = {each.storage for each in inputs}
        outputs = [access(tensor, True) for tensor in tensors_in(call.out)]
        results = [each for each in outputs if each.storage not in storages]
        everything = inputs + results
        operator = call.operator
        # A collective is told by itself.
        touched = [] if operator.is_collective else everything if operator.has_access else results
        devices = {each.device for each in everything}
        devices.discard(-1)
        if not devices:
            self.touch(self.actor(), touched, call.func)
            return
        index = max(devices)
        stream = stream_named(index, LIBRARY.pretended_stream(index))
        streams = {stream_named(each, LIBRARY.pretended_stream(each)) for each in devices} if len(devices) > 1 else ()
        for each in streams:  # a copy between devices: each stream waits for the other's
            for other in streams:
                _advance(self.clock(each), self.clock(other))
        actor = self.actor()
        if actor == HOST and threading.current_thread() is not threading.main_thread():
            self.num_on_autograd_threads += 1
        _advance(self.clock(stream), self.clock(actor))
        self.touch(stream, touched, call.func)
        for each in streams:
            _advance(self.clock(each), self.clock(stream))
        self.note_work(stream, call, touched)
        if operator.name in COPIES and any(each.device < 0 and each.tensor.numel() for each in everything):
            self._note_copy(call, stream, everything)
        elif reads_size(call):
            self.host_waits(stream)

    def note_work(self, stream: str, call: Call, touched: list[Access]) -> None:
        """Is called for each operator that is queued on a stream."""

    def _note_copy(self, call: Call, stream: str, everything: list[Access]) -> None:
        """A copy between host and device."""
        names = [argument.name for argument in call.func._schema.arguments]
        options = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        # `_foreach_copy_` returns nothing; the others return where they copy to.
        arrives = any(
            tensor.device.type == "cpu" for tensor in tensors_in(call.args[0] if call.out is None else call.out)
        )
        hosts = [each for each in everything if each.device < 0]
        num_bytes = sum(each.tensor.nbytes for each in hosts)
        self.copied_bytes["outbound" if arrives else "inbound", stream] += num_bytes
        if not options.get("non_blocking"):
            self.host_waits(stream)
            return
        for each in hosts:
            memory = self._memory_of(each)
            if memory is None:
                if each.tensor.is_pinned():
                    continue  # by torch, before the detector was entered
                self.unpinned[f"{call.func} {tuple(each.tensor.shape)} {_where()}"] += 1
                if arrives:
                    self.host_waits(stream)
            elif memory.is_ours and each.tensor.is_contiguous():
                self._send(each.span, stream, arrives=arrives)

    def _send(self, span: Span, stream: str, *, arrives: bool) -> None:
        start, end = span
        content = ctypes.string_at(start, end - start)
        if arrives:
            ctypes.memset(start, _POISON, end - start)
        self._in_flight.append(_InFlight(stream, self.clock(stream)[stream], span, content, arrives, _where()))

    def _finish(self, copy: _InFlight) -> None:
        if copy not in self._in_flight:
            return  # finished by what was collected meanwhile
        self._in_flight.remove(copy)
        start, end = copy.span
        if not is_mapped(start):
            self.races[f"host memory is unmapped while {copy.actor} may still use it; copied in {copy.where}"] += 1
            return
        expected = bytes([_POISON]) * (end - start) if copy.arrives else copy.content
        if ctypes.string_at(start, end - start) != expected:
            verb = "arrives in" if copy.arrives else "leaves"
            self.races[f"host memory was written while {copy.actor} {verb} it; copied in {copy.where}"] += 1
        if copy.arrives:
            ctypes.memmove(start, copy.content, end - start)

    def _finish_known(self, clock: Clock) -> None:
        """Finish the copies that a thread knows to have ended."""
        for copy in [each for each in self._in_flight if clock.get(each.actor, 0) >= each.when]:
            self._finish(copy)

    def uploaded(self, index: int) -> None:
        """Note that numbers of Python's became a tensor of a device, which torch shows to no mode."""
        with self._lock:
            self.catch_up()
            self.host_waits(stream_named(index, LIBRARY.pretended_stream(index)))

    def host_waits(self, stream: str) -> None:
        self.waits[_where()] += 1
        self._let_wait(self.actor(), self.clock(stream))

    def _note_collective(self, name: str, stream: Any, inputs: Any, outputs: Any) -> None:
        """Note what a collective reads and writes on its stream."""
        with self._lock:
            self.catch_up()
            actor = stream_named(stream.device.index, stream.stream_id)
            _advance(self.clock(actor), self.clock(self.actor()))
            touched = [*(access(each, False) for each in inputs), *(access(each, True) for each in outputs)]
            self.touch(actor, touched, name)
            self.collectives[f"{name} in {_where()}"] += 1

    def touch(self, actor: str, touched: Iterable[Access], what: Any) -> None:
        """Note accesses of a stream or a thread.

        Args:
            actor: Which.
            touched: What.
            what: The operator, for a report.
        """
        accesses = [
            (memory, each.span, each.written)
            for each in touched
            if each.span[1] and (memory := self._memory_of(each)) is not None
        ]
        if accesses:
            self._access(actor, accesses, what)

    def touch_bytes(self, address: int, num_bytes: int, *, writes: bool, what: str) -> None:
        """Note that this thread touches host memory by other means than an operator."""
        with self._lock:
            self.catch_up()
            memory = self._pinned_at(address)
            if memory is not None:
                self._access(self.actor(), [(memory, (address, address + num_bytes), writes)], what)

    def _access(self, actor: str, accesses: list[tuple[Memory, Span, bool]], what: Any) -> None:
        clock = self.clock(actor)
        clock[actor] = now = clock.get(actor, 0) + 1
        for memory, span, written in accesses:
            for other, last in memory.last.items():
                if clock.get(other, 0) < last:
                    self._compare(memory, span, written, actor, other, what)
            memory.touched.setdefault(actor, {})[span, written] = memory.last[actor] = now

    def _compare(self, memory: Memory, span: Span, written: bool, actor: str, other: str, what: Any) -> None:
        for (its_span, wrote), when in memory.touched[other].items():
            if (written or wrote) and overlap(span, its_span) and self.clock(actor).get(other, 0) < when:
                verb, before = ("writes", "reads")[not written], ("wrote", "read")[not wrote]
                kind = "pinned memory" if memory.owner == HOST else "memory"
                self.races[f"{what} on {actor} {verb} {kind} that {other} {before}, unordered; {_where()}"] += 1
                return

    # ---- Threads of the host

    def begins(self, record: Clock, name: str) -> AbstractContextManager[None]:
        """Let a task of another thread, which this is, come after a record."""
        with self._lock:
            self.catch_up()
            number = LIBRARY.pretended_thread()
            actor = self._threads.setdefault(number, f"thread {number} ({name})")
            _advance(self.clock(actor), record)
        return self._mode_of_thread()

    @contextmanager
    def _mode_of_thread(self) -> Iterator[None]:
        """See the operators of this thread, once."""
        if getattr(self._modes, "is_entered", False):
            yield
            return
        self._modes.is_entered = True
        try:
            with _Thread(self):
                yield
        finally:
            self._modes.is_entered = False

    def record(self) -> Clock:
        """What this thread has done and seen."""
        with self._lock:
            self.catch_up()
            return self.clock(self.actor()).copy()

    def wait(self, record: Clock) -> None:
        """Let this thread come after a record."""
        with self._lock:
            self.catch_up()
            self._let_wait(self.actor(), record)


class _Thread(TorchDispatchMode):
    """The detector in another thread: torch's modes belong to one."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._detector.is_entered:
            return func(*args, **(kwargs or {}))
        return self._detector.__torch_dispatch__(func, types, args, kwargs)


@cache
def stream_named(device: int, stream: int) -> str:
    return f"stream {stream} of cuda:{device}"


def _advance(clock: Clock, record: Clock) -> None:
    """Let a clock have seen what another has."""
    for actor, number in record.items():
        if clock.get(actor, 0) < number:
            clock[actor] = number


def _where() -> str:
    """The innermost lines of the package, or else of anything but torch and this folder."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_HIDDEN):
            frames.append((path, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    ours = [f"{path.removeprefix(_PACKAGE)}:{line}" for path, line in frames if path.startswith(_PACKAGE)][:3]
    others = [f"{'/'.join(path.split('/')[-2:])}:{line}" for path, line in frames if "/torch/" not in path][:2]
    return " < ".join(ours or others)
