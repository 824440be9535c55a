"""Which groups of `state="disk"` wait in files and which in host memory, and the store of the files."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from slivertune.hift.config import HiFTConfig
from slivertune.hift.file_store import NUM_BUFFERS, FileStore
from slivertune.hift.group_file import GroupFile
from slivertune.hift.offload_buffer import waiting_bytes
from slivertune.hift.probe import StepMeter
from slivertune.hift.residency import ResidentGroup

_HEADER_BYTES = 2**16
"""Room that is taken for a file beside what waits."""


class DiskState:
    """Which groups wait in files, and the store of these; decided and opened at the first update or load.

    Args:
        config: HiFT's settings.
        meter: Knows what waits of a group.
    """

    def __init__(self, config: HiFTConfig, meter: StepMeter) -> None:
        self._config = config
        self._meter = meter
        self._files: dict[ResidentGroup, GroupFile] = {}
        self._store: FileStore | None = None
        self._coming: Sequence[int] = ()
        self.opened = ExitStack()
        """Removes all files when it is closed; holds neither groups nor weights."""
        self.groups: Sequence[ResidentGroup] = ()
        """All groups' owners of state, by index."""

    @property
    def is_open(self) -> bool:
        """Whether it is decided."""
        return self._store is not None

    @property
    def store(self) -> FileStore:
        """The files' store, once it is open."""
        assert self._store is not None
        return self._store

    def file_of(self, group: ResidentGroup) -> GroupFile | None:
        """A group's file; None of one that waits in host memory."""
        assert self._store is not None, "no group has state before the files' store is open"
        return self._files.get(group)

    def open(self) -> None:
        """Take room on the disk for all groups and one more, if that was not done before.

        Raises:
            OSError: If there is no room, or no folder; names it.
        """
        if self._store is not None:
            return
        sizes = [sum(waiting_bytes(group.weights, self._meter).values()) for group in self.groups]
        on_disk = groups_on_disk(sizes, self._config.state_ram_bytes)
        files = [sizes[index] + _HEADER_BYTES for index in on_disk]
        self._store = FileStore(
            Path(self._config.state_dir or "."),
            num_buffers=NUM_BUFFERS,
            buffer_bytes=max((sizes[index] for index in on_disk), default=0),
            needs_bytes=sum(files) + max(files, default=0),
        )
        self.opened.callback(self._store.close)
        self._files = {self.groups[index]: self._store.add(index) for index in on_disk}
        self.begin_turn(self._coming)

    def begin_turn(self, coming: Sequence[int]) -> None:
        """Read what comes next, and write what is not needed for a while.

        Args:
            coming: All groups by index, in the order of their turns from the active one on; none before all are loaded.
        """
        self._coming = coming
        if self._store is not None:
            self._store.expect(
                self._files[each] for each in map(self.groups.__getitem__, coming) if each in self._files
            )

    def check(self) -> None:
        """Try again what could not be written.

        Raises:
            OSError: If it still can't be; nothing is lost.
        """
        if self._store is not None:
            self._store.check()


def groups_on_disk(sizes: Sequence[int], ram_bytes: int) -> list[int]:
    """Which groups wait in files: as many as fit into some memory stay in it, the smallest first.

    They stay there for good. Every group is needed once a cycle, so that one kept for having been used last would be
    given up just before its next turn.

    Args:
        sizes: Bytes of each group.
        ram_bytes: Of the memory.

    Returns:
        The indices of the others, in order.
    """
    left, on_disk = ram_bytes, []
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        if sizes[index] <= left:
            left -= sizes[index]
        else:
            on_disk.append(index)
    return sorted(on_disk)
