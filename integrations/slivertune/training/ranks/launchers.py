"""Reads from the environment which launcher started this process."""

import os

_SET_BY_LAUNCHERS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Environment variables that torchrun, deepspeed and accelerate launch set in the processes they start."""
COMPARED = "SLIVERTUNE_COMPARED"
"""Environment variable in the processes that `slivertune compare` and a run beside dense fine-tuning start."""


def is_started_by_launcher() -> bool:
    """Return whether torchrun, deepspeed or accelerate launch has started this process."""
    return any(name in os.environ for name in _SET_BY_LAUNCHERS)


def is_launched() -> bool:
    """Return whether another process has started this one and passes Ctrl-C on to it."""
    return is_started_by_launcher() or COMPARED in os.environ


def describe_second_interrupt() -> str:
    """Describe how the user ends this process at once, after a first Ctrl-C.

    At the first Ctrl-C, deepspeed ends while its processes save, and so does accelerate launch with one process. The
    shell then has the terminal, so Ctrl-C no longer reaches this process. The agent of torchrun stays.
    """
    again = "Ctrl-C again ends at once"
    if not is_started_by_launcher() or "TORCHELASTIC_RUN_ID" in os.environ:
        return again
    return f"{again}; if the shell is back already, kill -s INT -- -{os.getpgrp()} does"


def sends_sigterm() -> bool:
    """Return whether the launcher answers Ctrl-C by SIGTERM, as deepspeed does, which then waits for 30 s."""
    return "LOCAL_RANK" in os.environ and "CROSS_RANK" in os.environ
