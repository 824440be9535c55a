"""The processes of a run and their groups: whether one still runs, how one ends, and how long collectives wait.

Whether a process of this machine runs is looked up when a collective has failed, to name the rank that died.

The limit that the user gave the default process group holds for all groups of a run. Engines make process groups of
their own, for which torch takes its defaults of 10 or 30 minutes: DeepSpeed (0.19.8) for the ranks that share a model
out, FSDP2's device meshes where the default group does not fit.
"""

import atexit
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slivertune.core.torch_internals import (
    default_group,
    default_timeout_of,
    process_groups,
    set_timeout,
    timeout_of,
)

_STATES = {
    "Z": "has ended",
    "X": "has ended",
    "T": "is stopped (SIGSTOP, or a debugger)",
    "t": "is stopped (a debugger)",
}
_MOMENT = 0.1
"""Seconds; a thread that waits needs microseconds."""


def own_identity() -> str:
    """This process, so that others on the same machine find it: machine, process namespace, id and start time."""
    return f"{_machine()} {os.getpid()} {_fields(os.getpid())[1]}"


def describe_end(identity: str) -> str | None:
    """What is known of a process.

    Args:
        identity: What `own_identity` returned there.

    Returns:
        Words such as "has ended"; None if it runs, or can't be seen from here.
    """
    machine, _, rest = identity.partition(" ")
    if machine != _machine():
        return None
    pid, _, started = rest.partition(" ")
    state, since = _fields(int(pid))
    if state and since != started:  # another process has its number now
        return "has ended"
    return "has ended" if not state and Path("/proc/self/stat").exists() else _STATES.get(state)


def _machine() -> str:
    namespace = Path("/proc/self/ns/pid").resolve().name
    boot = _text_of("/proc/sys/kernel/random/boot_id").strip()
    return f"{socket.gethostname()}/{boot}/{namespace}".replace(" ", "_")


def _fields(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty if there is none, or this system does not tell."""
    # The name, in parentheses, may hold anything.
    fields = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if fields else ("", "")


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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


@contextmanager
def keeping_timeout() -> Iterator[None]:
    """Give every process group that is made inside, and in which this rank is, the default group's timeout.

    Groups that were there before keep theirs: the user may have made them. Where the default group itself is made
    inside, with whatever timeout its maker was told, the others follow it.
    """
    before = set(process_groups())
    yield
    if dist.is_available() and dist.is_initialized():
        _follow_default(group for group in process_groups() if group not in before)


def follow_default_timeout(groups: Iterable[Any]) -> None:
    """Give an engine's process groups the default group's timeout, unless theirs is not torch's own default.

    They may be older than the engine: a model that is born in parts (ZeRO-3) makes them first.

    Args:
        groups: The engine's; None and repetitions among them are passed over.
    """
    _follow_default(each for each in groups if each is not None and timeout_of(each) == default_timeout_of(each))


def _follow_default(groups: Iterable[Any]) -> None:
    timeout = timeout_of(default_group())
    for group in groups:
        if timeout is not None and group is not default_group() and timeout_of(group) != timeout:
            set_timeout(group, timeout)
