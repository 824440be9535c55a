"""Processes of a run and the timeouts of their process groups.

After a failed collective, the processes of this machine are looked up to name the rank that died.

The user's timeout of the default process group applies to all groups of a run. Engines make groups of their own, for
which torch uses its defaults of 10 or 30 minutes: DeepSpeed (0.19.8) for the ranks that shard a model, FSDP2's device
meshes if the default group does not fit.
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
"""Seconds that the exit is delayed. A thread needs microseconds."""


def own_identity() -> str:
    """Identify this process for others on the same machine: machine, process namespace, id and start time."""
    return f"{_machine()} {os.getpid()} {_fields(os.getpid())[1]}"


def describe_end(identity: str) -> str | None:
    """Describe how a process ended.

    Args:
        identity: Result of `own_identity` in that process.

    Returns:
        Words such as "has ended"; None if it runs, or is not visible from here.
    """
    machine, _, rest = identity.partition(" ")
    if machine != _machine():
        return None
    pid, _, started = rest.partition(" ")
    state, since = _fields(int(pid))
    if state and since != started:  # the id belongs to another process now
        return "has ended"
    return "has ended" if not state and Path("/proc/self/stat").exists() else _STATES.get(state)


def _machine() -> str:
    namespace = Path("/proc/self/ns/pid").resolve().name
    boot = _text_of("/proc/sys/kernel/random/boot_id").strip()
    return f"{socket.gethostname()}/{boot}/{namespace}".replace(" ", "_")


def _fields(pid: int) -> tuple[str, str]:
    """Read state and start time of a process. Both are empty if there is none, or this system does not report them."""
    # The name, in parentheses, may contain any character.
    fields = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if fields else ("", "")


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def let_threads_finish_at_exit() -> None:
    """Give gloo's threads time to drop the tensors of the last collective before Python exits.

    Dropping them takes Python's lock. A thread that requests it after Python has ended is torn down inside C++, which
    aborts the process. The rank's work is done, but its launcher ends the others and reports a failure (torch 2.13;
    `destroy_process_group` alone does not help, since DistributedDataParallel keeps a reference to its group).
    """
    atexit.unregister(_let_threads_finish)
    atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    time.sleep(_MOMENT)


@contextmanager
def keeping_timeout() -> Iterator[None]:
    """Give every process group of this rank that the block makes the default group's timeout.

    Older groups keep their timeout: the user may have made them. If the block makes the default group itself, its
    timeout applies to the others.
    """
    before = set(process_groups())
    yield
    if dist.is_available() and dist.is_initialized():
        _follow_default(group for group in process_groups() if group not in before)


def follow_default_timeout(groups: Iterable[Any]) -> None:
    """Give an engine's process groups the default group's timeout, unless theirs is not torch's own default.

    The groups may be older than the engine: a model that ZeRO-3 shards at its creation makes them first.

    Args:
        groups: The engine's groups; None and repetitions are skipped.
    """
    _follow_default(each for each in groups if each is not None and timeout_of(each) == default_timeout_of(each))


def _follow_default(groups: Iterable[Any]) -> None:
    timeout = timeout_of(default_group())
    for group in groups:
        if timeout is not None and group is not default_group() and timeout_of(group) != timeout:
            set_timeout(group, timeout)
