"""Whether a process of this machine still runs: looked up when a collective has failed, to name the rank that died."""

import os
import socket
from pathlib import Path

_STATES = {
    "Z": "has ended",
    "X": "has ended",
    "T": "is stopped (SIGSTOP, or a debugger)",
    "t": "is stopped (a debugger)",
}


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
    return "has ended" if not state and _sees_processes() else _STATES.get(state)


def _machine() -> str:
    namespace = Path("/proc/self/ns/pid")
    try:
        number = namespace.readlink().name
    except OSError:
        number = ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}/{number}".replace(" ", "_")


def _sees_processes() -> bool:
    return Path("/proc/self/stat").exists()


def _fields(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty if there is none, or this system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    # The name, in parentheses, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]
