import atexit
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.consistency.processes import describe_end, keeping_timeout, own_identity, timeout_of
from slivertune.training.ranks.coordinator import join_launch
from tests.helpers.ranks import run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import ZERO, quiet, running

AT_EXIT = "from slivertune.parallel.consistency import processes; processes.let_threads_finish_at_exit()"


# The control imports nothing of ours: what torch does when Python ends gives way to the thread in every other run.
@pytest.mark.parametrize(("at_exit", "printed"), [(AT_EXIT, b"finished"), ("", b"")])
def test_a_thread_that_waits_for_python_gets_it_before_python_ends(at_exit: str, printed: bytes) -> None:
    # In place of gloo's thread, which aborts the process where this one prints nothing.
    script = f"""
import os, sys, threading, time
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
    for none, with_heartbeat, with_launch in run_ranks(count_exit_callbacks, 2, is_first=True):
        assert none < with_heartbeat < with_launch


def test_a_process_is_known_to_live_or_to_have_ended() -> None:
    own = own_identity()
    assert describe_end(own) is None
    machine, pid, started = own.split(" ")
    assert describe_end(f"{machine} {pid} {int(started) - 1}") == "has ended"  # its number was given anew
    assert describe_end(f"another/{machine} {pid} 0") is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # has ended, and is still listed
    assert describe_end(f"{machine} {child} {Path(f'/proc/{child}/stat').read_text().split()[21]}") == "has ended"
    os.waitpid(child, 0)
    assert describe_end(f"{machine} {child} 0") == "has ended"


def timeouts_of_groups(rank: int, num_ranks: int) -> list[timedelta | None]:
    quiet()
    import deepspeed

    # As of a model that is born in parts: DeepSpeed makes its group before the engine, with torch's own default.
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.utils.groups._clone_world_group()
    found = []
    for layout in ZERO:
        with running(HiFTCase(), layout, rank):
            found += [timeout_of(group) for group in dist.distributed_c10d._world.pg_map]
    return found


@pytest.mark.slow
def test_every_process_group_of_an_engine_has_the_users_timeout() -> None:
    for found in run_ranks(timeouts_of_groups, 2, is_first=True):
        assert set(found) == {timedelta(seconds=60)}


def test_groups_that_were_there_before_keep_their_timeout(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    with keeping_timeout():  # on one process without a group there is nothing to keep
        pass
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1, timeout=timedelta(seconds=17)
    )
    try:
        own = dist.new_group([0], timeout=timedelta(seconds=5))
        with keeping_timeout():
            made = dist.new_group([0])
            assert timeout_of(made) != timedelta(seconds=17)
        assert timeout_of(made) == timedelta(seconds=17)
        assert timeout_of(own) == timedelta(seconds=5)
    finally:
        dist.destroy_process_group()
