"""File locks that end with their process, on file systems that have them: not every network file system does."""

import fcntl
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool | None:
    """Lock an open file without waiting, for as long as it is open.

    Args:
        file: File that is open for writing.

    Returns:
        Whether this process holds the lock now. None if there are no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def wait_for_lock(file: IO[Any]) -> None:
    """Lock an open file, after any other holder, for as long as it is open.

    Args:
        file: File that is open for writing.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
