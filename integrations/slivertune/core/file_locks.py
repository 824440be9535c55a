"""File locks that end with their process, on systems that have them: not Windows, nor every network file system."""

from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def try_lock(file: IO[Any]) -> bool | None:
    """Lock an open file without waiting, for as long as it is open.

    Args:
        file: File that is open for writing.

    Returns:
        Whether this process holds the lock now. None if there are no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def wait_for_lock(file: IO[Any]) -> None:
    """Lock an open file, after any other holder, for as long as it is open. Do nothing without file locks.

    Args:
        file: File that is open for writing.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
