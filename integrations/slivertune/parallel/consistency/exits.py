"""How a process that has trained on several ranks ends."""

import atexit
import time

_MOMENT = 0.1
"""Seconds; a thread that waits needs microseconds."""


def let_threads_finish_at_exit() -> None:
    """Give gloo's threads a moment to drop the tensors of the last collective before Python ends.

    Dropping them takes Python's lock. A thread that asks for it when Python has ended is torn down in the midst of C++,
    which aborts the process: a rank whose work is done, and whose launcher then ends the others and reports a failure
    (torch 2.13; `destroy_process_group` alone does not help, since DistributedDataParallel holds on to its group).
    """
    atexit.unregister(_let_threads_finish)
    atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    time.sleep(_MOMENT)
