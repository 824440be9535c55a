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


def sends_sigterm() -> bool:
    """Return whether the launcher answers Ctrl-C by SIGTERM, as deepspeed does, which then waits for 30 s."""
    return "LOCAL_RANK" in os.environ and "CROSS_RANK" in os.environ
