"""Large files read and written past the system's cache of files, where the file system allows that.

What is read once and written once only pushes out of the cache what is read again. Both directions take one thread and
large parts; more threads were no faster where it was measured.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""Memory, places in a file and lengths are multiples of this."""
PART_BYTES = 16 * 2**20
"""Of one read or write."""

Watch = Callable[[], None]
"""Called before each part; what it raises ends the transfer."""


def in_pages(num_bytes: int) -> int:
    """Round up to `PAGE_BYTES`."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def page_memory(content: bytes, num_bytes: int) -> memoryview:
    """Memory in whole pages that begins with some bytes.

    Args:
        content: With which it begins; zeros follow.
        num_bytes: How many; a multiple of `PAGE_BYTES`.
    """
    memory = mmap.mmap(-1, num_bytes)
    memory[: len(content)] = content
    return memoryview(memory)


def read_file(path: Path, start: int, memory: memoryview, watch: Watch) -> None:
    """Fill memory from a file.

    Args:
        path: The file.
        start: Where in it to begin; a multiple of `PAGE_BYTES`.
        memory: Begins at a page; of whole pages.
        watch: Called before each part.

    Raises:
        OSError: If the file can't be read, or ends too early; names it.
    """
    descriptor = _open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(memory):
            watch()
            num_bytes = os.preadv(descriptor, [memory[done : done + PART_BYTES]], start + done)
            if num_bytes == 0:
                raise OSError(f"{path} ends after {start + done:,} bytes, and {start + len(memory):,} were written")
            done += num_bytes
    finally:
        os.close(descriptor)


def write_file(path: Path, memories: Sequence[memoryview], watch: Watch) -> None:
    """Write a new file whole; its room is taken first. A file that was not finished is removed.

    Args:
        path: The file; there is none yet, or one that nobody reads.
        memories: What follows each other in it; each begins at a page and has whole pages.
        watch: Called before each part.

    Raises:
        OSError: If it can't be written.
    """
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(descriptor, 0, sum(map(len, memories)))
        start = 0
        for memory in memories:
            done = 0
            while done < len(memory):
                watch()
                done += os.pwritev(descriptor, [memory[done : done + PART_BYTES]], start + done)
            start += done
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError:
        # Not every file system has it; what else is wrong shows here again.
        return os.open(path, flags, 0o666)
