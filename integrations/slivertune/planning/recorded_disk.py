"""A disk whose reads and writes a recorder takes down; nothing is read or written, and all threads run in plain order.

What the store of files chooses is done at once, as the copies of `RecordedStreams` are, and the moment at which a
thread would have come to its end is an event. A thread waits for what the store lets it wait for: the copies into and
out of a buffer, what is written from the buffer that is read into, and what is still to be written of the file that is
read. With two buffers these waits leave it nothing else to do meanwhile, so that it chooses as the real one does.

Whether a file has been read by the time the host asks depends on rates, which are not known here. It counts as read
where the host has waited for it. Else the host goes on without it, and loads it when it waits for it in the step, as in
a run whose host is as far ahead of the device as it can be.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from slivertune.core.copy_streams import Event
from slivertune.hift.disk import Choose, Disk, Move
from slivertune.hift.group_image import GroupImage, Name
from slivertune.planning.schedule import Access
from slivertune.planning.schedule_recorder import ScheduleRecorder


class RecordedDisk(Disk):
    """A disk without files or threads.

    Args:
        recorder: Writes.
        target: Whose folder it would be.
        needs_bytes: Room that would be taken.
    """

    def __init__(self, recorder: ScheduleRecorder, target: Path, needs_bytes: int) -> None:
        self._recorder = recorder
        self._folder = target
        self._tasks: dict[Access, tuple[Choose, Move]] = {}
        self.changed: Any = _PlainOrder(self._run_tasks)

    @override
    def start(self, reader: tuple[Choose, Move], writer: tuple[Choose, Move]) -> None:
        self._tasks = {"reader": reader, "writer": writer}

    @override
    def read(self, path: Path, start: int, memory: torch.Tensor) -> Event:
        return self._move("reader", memory.nbytes)

    @override
    def write(self, path: Path, image: GroupImage, memory: torch.Tensor, older: GroupImage | None) -> Event:
        return self._move("writer", image.file_bytes)

    @override
    def mapped(self, path: Path, models: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        return {
            name: self._recorder.note_host_memory(torch.empty_like(model, device="cpu"))
            for name, model in models.items()
        }

    @override
    def remove(self, path: Path, image: GroupImage) -> None:
        pass

    @override
    def wait_on_host(self, event: Event) -> None:
        if event is not None:
            self._recorder.finish(event)

    @override
    def has_happened(self, event: Event) -> bool:
        return event is None or self._recorder.has_finished(event)

    @override
    def close(self) -> None:
        self._tasks = {}

    def _move(self, thread: Access, num_bytes: int) -> Event:
        self._recorder.move_file(thread, num_bytes)
        return self._recorder.record(thread)

    def _run_tasks(self) -> bool:
        """Let each thread do all that it would choose by now; whether there was anything."""
        has_moved = False
        while any(self._run(thread, *task) for thread, task in self._tasks.items()):
            has_moved = True
        return has_moved

    def _run(self, thread: Access, choose: Choose, move: Move) -> bool:
        chosen = choose()
        if chosen is None:
            return False
        with self._recorder.on(thread):
            move(*chosen)
        return True


class _PlainOrder:
    """Stands in for a condition variable: what others would do meanwhile is done when the lock is free, or waited with.

    Args:
        run: Does it; returns whether there was anything.
    """

    def __init__(self, run: Callable[[], bool]) -> None:
        self._run = run
        self._depth = 0
        self._is_running = False

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and error[0] is None:
            self._run_others()

    def notify_all(self) -> None:
        """Nobody sleeps."""

    def wait(self) -> None:
        """Let the others run.

        Raises:
            RuntimeError: If none of them has anything to do.
        """
        if not self._run_others():
            raise RuntimeError("the store of files waits for a read or write that nothing leads to")

    def _run_others(self) -> bool:
        if self._is_running:
            return False
        self._is_running = True
        try:
            return self._run()
        finally:
            self._is_running = False
