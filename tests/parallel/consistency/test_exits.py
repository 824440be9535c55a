import atexit
import subprocess
import sys

import pytest

from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.training.ranks.coordinator import join_launch
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(("at_exit", "printed"), [("let_threads_finish_at_exit()", b"finished"), ("", b"")])
def test_a_thread_that_waits_for_python_gets_it_before_python_ends(at_exit: str, printed: bytes) -> None:
    # In place of gloo's thread, which aborts the process where this one prints nothing.
    script = f"""
import os, sys, threading, time
from slivertune.parallel.consistency.exits import let_threads_finish_at_exit
{at_exit}
sys.setswitchinterval(1000)
is_asleep = threading.Event()
def finish():
    is_asleep.set()
    time.sleep(0.01)
    os.write(1, b"finished")
threading.Thread(target=finish, daemon=True).start()
is_asleep.wait()
start = time.perf_counter()
while time.perf_counter() - start < 0.2:
    pass
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def count_exit_callbacks(rank: int, world: int) -> list[int]:
    counts = [atexit._ncallbacks()]
    for begin in (lambda: Heartbeat("one"), join_launch):
        begin()
        counts.append(atexit._ncallbacks())
    return counts


def test_ranks_of_a_method_and_of_the_command_ask_for_it() -> None:
    for none, with_heartbeat, with_launch in run_ranks(count_exit_callbacks, 2):
        assert none < with_heartbeat < with_launch
