"""Measure the host memory that a process may still use, limited by the machine and its control groups (containers)."""

from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 2**60
"""Bytes. Without a limit, control groups of version 1 report this many or more."""


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that are free, or held only by file caches.

    Args:
        root: Folder that holds `proc` and `sys`.

    Returns:
        Smallest of the machine's value and the values of this process's control groups. None if none of them is known.
    """
    known = [*_of_machine(root / "proc/meminfo"), *_of_control_groups(root)]
    return max(0, min(known)) if known else None


def _of_machine(path: Path) -> Iterator[int]:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_control_groups(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container sees its own group as the top. Each group above may set a lower limit.
        inner = top / path.strip("/")
        for folder in (top, *(each for each in (inner, *inner.parents) if top in each.parents)):
            yield from _of_folder(folder, *names)


def _of_folder(folder: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdecimal() or not used.isdecimal() or int(most) >= _NO_LIMIT:
        return
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    yield int(most) - int(used) + int(stat.get(cached, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
