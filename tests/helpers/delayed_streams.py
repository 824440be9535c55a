"""Copies that happen late: any order that events and waits allow, drawn by a seed.

What is queued on a side stream runs when somebody waits for it, or at some moment before that. The target of a load
holds NaNs and large numbers until then. So a wait that is missing shows as other bits, on a CPU.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slivertune.core.copy_streams import CopyStreams, Direction, streams_made_by

_POISON = 0xFF


class _Capture(TorchDispatchMode):
    """Keeps operators that write, in place of running them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Callable[[], Any]] = []
        self.targets: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.kept.append(lambda: func(*args, **kwargs))
        self.targets.append(args[0])
        return args[0]


class DelayedStreams(CopyStreams):
    """Copy streams of a CPU whose copies happen as late as they may, or earlier, as a seed draws.

    Args:
        device: The device.
        seed: Draws; None is always as late as possible.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        super().__init__(device)
        self._random = random.Random(seed)
        self._is_lazy = seed is None
        # Threads that read and write files wait for copies, too.
        self._lock = threading.RLock()
        self._queued: dict[Direction, list[tuple[list[Any], list[Callable[[], Any]]]]] = {"inbound": [], "outbound": []}
        self._done: dict[Direction, int] = {"inbound": 0, "outbound": 0}
        self.num_late = 0
        """Groups of copies that ran later than they were queued."""

    @contextmanager
    def on(self, direction: Direction, *after: Any) -> Iterator[None]:
        with self._lock:
            yield from self._capture(direction, *after)

    def _capture(self, direction: Direction, *after: Any) -> Iterator[None]:
        capture = _Capture()
        # Queued before it is filled: an event that is recorded inside means what is done inside.
        self._queued[direction].append(([event for event in after if event is not None], capture.kept))
        with capture:
            yield
        if direction == "inbound" and self._done["outbound"] == len(self._queued["outbound"]):
            # Nothing that is still to leave lies there.
            for target in capture.targets:
                target.view(torch.uint8).fill_(_POISON)
        if not self._is_lazy:
            self._run_some()

    def record(self, direction: Direction | None = None) -> Any:
        return None if direction is None else (direction, len(self._queued[direction]))

    def compute_after(self, event: Any) -> None:
        if event is not None:
            self._run_until(*event)

    def host_memory(self, num_bytes: int, *, is_inherited: bool = False) -> torch.Tensor:
        # What lay there before may be what is copied there.
        return super().host_memory(num_bytes, is_inherited=is_inherited).fill_(_POISON)

    def synchronize(self) -> None:
        for direction, queued in self._queued.items():
            self._run_until(direction, len(queued))

    def wait_on_host(self, event: Any) -> None:
        self.compute_after(event)

    def _run_some(self) -> None:
        for direction, queued in self._queued.items():
            waiting = len(queued) - self._done[direction]
            if waiting and self._random.random() < 0.5:
                self._run_until(direction, self._done[direction] + self._random.randint(1, waiting))

    def _run_until(self, direction: Direction, place: int) -> None:
        with self._lock, torch.no_grad():
            self._run_in_order(direction, place)

    def _run_in_order(self, direction: Direction, place: int) -> None:
        while self._done[direction] < place:
            after, kept = self._queued[direction][self._done[direction]]
            for event in after:
                self._run_until(*event)
            with torch.no_grad():  # as where it was queued
                for run in kept:
                    run()
            self._queued[direction][self._done[direction]] = ([], [])
            self._done[direction] += 1
            self.num_late += 1


@contextmanager
def delayed(seed: int | None) -> Iterator[list[DelayedStreams]]:
    """Streams whose copies are late; those that were made."""
    made: list[DelayedStreams] = []

    def make(device: torch.device) -> DelayedStreams:
        made.append(DelayedStreams(device, seed))
        return made[-1]

    with streams_made_by(make):
        yield made
