"""Runs a function on several ranks: processes of their own, gloo over a file, with this run's threads each.

Ranks take seconds to start, so most of their cases are left to `make test-all`, and a fixture that starts them for many
tests runs only the cases that are asked for.
"""

import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "accelerate"]
"""Imported once, by a process from which the ranks are forked: seconds of a core for each of them."""


class RankError(AssertionError):
    """A rank failed, hung or vanished."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 180,
    collective_timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Run `function(rank, num_ranks, *args)` on every rank of a new gloo group.

    Args:
        function: A module's own function; its result is pickled.
        num_ranks: Ranks.
        *args: Picklable.
        timeout_s: Seconds until a rank that has not returned counts as hung.
        collective_timeout_s: Seconds until a collective raises.
        env: Set in every rank before torch.distributed starts, as `{"DS_ACCELERATOR": "cpu"}`.
        may_die: Ranks that may vanish without a result, which is None then.

    Returns:
        The result of each rank.

    Raises:
        RankError: With the traceback of every rank that failed, or the names of those that hung.
    """
    with tempfile.TemporaryDirectory(prefix="slivertune-ranks-") as folder:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(env or {}),
        }
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        processes = [
            context.Process(
                target=_work,
                args=(function, rank, num_ranks, folder, environment, collective_timeout_s, may_die, args),
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        return _collect(Path(folder), num_ranks, hung, may_die, timeout_s)


def _collect(folder: Path, num_ranks: int, hung: list[int], may_die: tuple[int, ...], timeout_s: float) -> list[Any]:
    results, failures = [], []
    for rank in range(num_ranks):
        path = folder / f"{rank}.result"
        if not path.exists():
            results.append(None)
            if rank not in may_die:
                failures.append(
                    f"rank {rank} did not return within {timeout_s} s" if rank in hung else f"rank {rank} vanished"
                )
            continue
        succeeded, value = pickle.loads(path.read_bytes())
        results.append(value)
        if not succeeded:
            failures.append(f"rank {rank} failed:\n{value}")
    if failures:
        raise RankError("\n".join(failures))
    return results


def _work(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    folder: str,
    environment: dict[str, str],
    collective_timeout_s: float,
    may_die: tuple[int, ...],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # The Trainer before transformers 5.18 reads its state onto "cpu:0" there, which torch knows as "cpu" alone.
    torch.serialization.register_package(0, lambda _: None, lambda obj, place: obj if place == "cpu:0" else None)
    outcome: tuple[bool, Any]
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=collective_timeout_s),
        )
        torch.manual_seed(0)
        outcome = (True, function(rank, num_ranks, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    temporary = Path(folder) / f"{rank}.partial"
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(Path(folder) / f"{rank}.result")
    if outcome[0]:
        _leave_together(folder, [other for other in range(num_ranks) if other not in may_die])
    # Engines leave threads and groups behind whose teardown has aborted processes after their work was done.
    os._exit(0)


def _leave_together(folder: str, ranks: Sequence[int]) -> None:
    """Wait for the others' results, so that no rank's end breaks a connection that another still needs."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if all((Path(folder) / f"{other}.result").exists() for other in ranks):
            return
        time.sleep(0.02)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@contextmanager
def single_rank(folder: Path) -> Iterator[None]:
    """A process group of one rank inside, for torch.distributed.checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def quick(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values of a parametrized test, all but a few of them marked as slow.

    Args:
        cases: Names, or tuples of several arguments.
        kept: Those that `make test` runs; each is one of `cases`.

    Returns:
        What `pytest.mark.parametrize` takes.
    """
    cases = list(cases)
    unknown = [case for case in kept if case not in cases]
    assert not unknown, f"{unknown} are none of {cases}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.slow)
        for case in cases
    ]


def asked_for(request: pytest.FixtureRequest, *arguments: str) -> set[Any]:
    """The values with which the tests of this run call for a fixture's results.

    Args:
        request: Of a fixture of a module.
        *arguments: Names of arguments that its tests are parametrized by.

    Returns:
        The value, or a tuple of several, of each test of the module that is parametrized by all of them.
    """
    found = set()
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and all(name in values for name in arguments):
            asked = tuple(values[name] for name in arguments)
            found.add(asked if len(asked) > 1 else asked[0])
    return found
