"""Streams that are only pretended: who may touch which memory when, checked on a CPU.

Streams of a device run beside each other and beside the host; what orders them are events and waits. `Streams` stands
in for them: every operator that torch runs is noted as one of the computing stream, of a copy stream or of the host,
with the bytes that it reads and writes, and must come *after* every earlier one that wrote them (or read what it
writes). It does so if it follows in the same stream, or through a chain of events and waits (vector clocks). Memory on
the device that is released belongs to the stream that allocated it, at once, as in torch's caching allocator; memory
of the host is unpinned and gone. Both must come after all that other streams still do with it.

The operators really run one after the other, so results are right even where the order is not promised: what a GPU
would make a rare wrong bit is here a line in `violations`, every time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slivertune.core.copy_streams import CopyStreams, Direction

Clock = dict[str, int]
"""How far a stream has seen each stream: number of its operators by stream."""
Span = tuple[int, int]

HOST = "host"
COMPUTING = "computing"
# Operators that take from their inputs nothing but shape and dtype.
_FORM_ALONE = frozenset({"empty_like", "new_empty", "new_zeros", "zeros_like", "ones_like", "full_like"})


class _Memory:
    """What happened to one storage: when each stream last read or wrote which bytes, and when it last did anything."""

    def __init__(self, owner: str, death: weakref.ref[torch.UntypedStorage]) -> None:
        self.owner = owner
        self.death = death
        self.touched: dict[str, dict[tuple[Span, bool], int]] = {}
        self.last: Clock = {}


class Streams(TorchDispatchMode):
    """Notes operators by stream while it is entered; `violations` says what was not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.current = COMPUTING
        self.host = HOST
        """The thread of the host that runs now: the main one, or another that was added."""
        self.num_by_stream: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        """Between host and device, by the stream that copies."""
        self._clocks: dict[str, Clock] = {HOST: {}, COMPUTING: {}}
        self._memory: dict[int, _Memory] = {}
        self._watching = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Save the wrapper that torch puts around each operator's call for the sake of compiled code."""
        return False

    def __enter__(self) -> Streams:
        self._watching = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching = False

    def add(self, name: str) -> str:
        """Make another stream."""
        name = f"{name} {len(self._clocks)}"
        self._clocks[name] = {}
        return name

    def record(self, stream: str) -> Clock:
        """What has been queued on a stream so far, and all that it waits for."""
        return self._clocks[stream].copy()

    def wait(self, stream: str, record: Clock) -> None:
        """Let what comes next on a stream come after an event."""
        _advance(self._clocks[stream], record)

    def touch(self, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        """Note that the running thread reads or writes host memory by other means than an operator."""
        self._note(self.host, [(self._of(tensor, self.host), tensor, writes)], what)

    def call_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor lies in (pinned) host memory."""
        self._of(tensor, HOST).owner = HOST
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        touched: list[tuple[_Memory, torch.Tensor, bool]] = []
        for position, (name, written) in enumerate(_tensor_arguments(func)):
            value = args[position] if position < len(args) else kwargs.get(name)
            touched += [(self._of(tensor, self.current), tensor, written) for tensor in _tensors(value)]
        inputs = [tensor for _, tensor, _ in touched]
        owners = {memory.owner for memory, _, _ in touched}
        stream = HOST if owners == {HOST} else self.current
        known = {memory for memory, _, _ in touched}
        if func.overloadpacket.__name__ in _FORM_ALONE:
            touched.clear()
        # A form that is taken with a device of its own is for a copy that goes there.
        owner = self.current if func.overloadpacket.__name__ in _FORM_ALONE and kwargs.get("device") else stream
        for tensor in _tensors(out):
            memory = self._of(tensor, owner)
            if memory not in known:
                touched.append((memory, tensor, True))
        self._note(stream, touched, func)
        if HOST in owners and len(owners) > 1:
            self.copied_bytes[stream.partition(" ")[0]] += inputs[-1].nbytes
            if not _is_non_blocking(func, args, kwargs):
                self.wait(HOST, self.record(stream))  # such a copy makes the host wait for its stream
        return out

    def _of(self, tensor: torch.Tensor, owner: str) -> _Memory:
        """The memory of a tensor, which belongs to `owner` if nobody has known it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(owner, weakref.ref(storage, lambda _: self._release(key)))
        return memory

    def _note(self, stream: str, touched: list[tuple[_Memory, torch.Tensor, bool]], what: Any) -> None:
        clock = self._clocks[stream]
        _advance(clock, self._clocks[HOST])  # what the host queues comes after what the host has done
        clock[stream] = now = clock.get(stream, 0) + 1
        self.num_by_stream[stream.partition(" ")[0]] += 1
        for memory, tensor, written in touched:
            span = _span(tensor)
            for other, last in memory.last.items():
                if clock.get(other, 0) < last:
                    self._compare(memory, span, written, stream, other, what)
            memory.touched.setdefault(stream, {})[span, written] = memory.last[stream] = now

    def _compare(self, memory: _Memory, span: Span, written: bool, stream: str, other: str, what: Any) -> None:
        """Note what a stream touches of the same bytes that another touched, for which it has not waited."""
        for (its_span, wrote), when in memory.touched[other].items():
            overlap = span[0] < its_span[1] and its_span[0] < span[1]
            if overlap and (written or wrote) and self._clocks[stream].get(other, 0) < when:
                verb, verb_before = ("writes", "reads")[not written], ("wrote", "read")[not wrote]
                self.violations.append(f"{what} on {stream} {verb} what {other} {verb_before}, with no wait between")

    def _release(self, key: int) -> None:
        memory = self._memory.pop(key)
        if not self._watching:
            return
        clock = self.record(memory.owner)
        _advance(clock, self._clocks[HOST])
        for other, last in memory.last.items():
            if clock.get(other, 0) < last:
                kind = "host memory" if memory.owner == HOST else "memory"
                self.violations.append(f"{kind} of {memory.owner} is released while {other} uses it")


def _advance(clock: Clock, record: Clock) -> None:
    """Let a clock have seen what another has."""
    for stream, number in record.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


@cache
def _tensor_arguments(func: Any) -> list[tuple[str, bool]]:
    """The names of an operator's arguments, and whether it writes them."""
    return [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that an operator's argument or result is, but those without memory."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_meta else [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _is_non_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [name for name, _ in _tensor_arguments(func)]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking"))


def _span(tensor: torch.Tensor) -> Span:
    """The bytes of the storage from the tensor's first element to its last."""
    start = tensor.storage_offset() * tensor.itemsize
    if tensor.is_contiguous():
        return (start, start + tensor.nbytes)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (start, start + (last + 1) * tensor.itemsize)


class PretendedStreams(CopyStreams):
    """Copy streams of a device that are pretended ones of `streams`, which a subclass sets."""

    streams: Streams

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._names: dict[Direction, str] = {}

    @contextmanager
    def on(self, direction: Direction, *after: Any) -> Iterator[None]:
        for record in after:
            if record is not None:
                self.streams.wait(self._name(direction), record)
        before, self.streams.current = self.streams.current, self._name(direction)
        try:
            yield
        finally:
            self.streams.current = before

    def record(self, direction: Direction | None = None) -> Any:
        return self.streams.record(COMPUTING if direction is None else self._name(direction))

    def compute_after(self, event: Any) -> None:
        if event is not None:
            self.streams.wait(COMPUTING, event)

    def wait_on_host(self, event: Any) -> None:
        if event is not None:
            self.streams.wait(self.streams.host, event)

    def synchronize(self) -> None:
        for name in self._names.values():
            self.streams.wait(HOST, self.streams.record(name))

    def host_memory(self, num_bytes: int, *, is_inherited: bool = False) -> torch.Tensor:
        return self.streams.call_host(torch.empty(num_bytes, dtype=torch.uint8))

    def _name(self, direction: Direction) -> str:
        if direction not in self._names:
            self._names[direction] = self.streams.add(direction)
        return self._names[direction]


class PretendedThread:
    """Stands in for a thread pool of one: what is submitted runs at once, and counts as a thread of its own.

    Nobody knows that a task has ended before having waited for it.

    Args:
        streams: Note what it does.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._name = streams.add("thread")

    def submit(self, function: Callable[..., Any], *arguments: Any) -> PretendedFuture:
        streams = self._streams
        streams.wait(self._name, streams.record(HOST))
        before, streams.host = streams.host, self._name
        future = PretendedFuture(streams)
        try:
            future.value = function(*arguments)
        except Exception as error:
            future.error = error
        finally:
            streams.host = before
        future.end = streams.record(self._name)
        return future

    def shutdown(self, **ignored: Any) -> None:
        pass


class PretendedFuture:
    """What a `PretendedThread` returns."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._is_known = False
        self.value: Any = None
        self.error: Exception | None = None
        self.end: Clock = {}

    def done(self) -> bool:
        return self._is_known

    def exception(self) -> Exception | None:
        self._is_known = True
        self._streams.wait(HOST, self.end)
        return self.error

    def result(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        return self.value
