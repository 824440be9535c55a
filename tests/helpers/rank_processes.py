"""The processes that are ranks, as the tests' own process sees them: started, given a case, watched and ended."""

import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from tests.helpers.rank_worker import log_of, serve
from tests.pretended_cuda.process import serve as serve_with_devices

CHECKOUT = Path(__file__).resolve().parents[2]
# From this checkout alone, and not from whichever is the working folder.
_PRELOADED = ["tests.helpers.rank_imports"] if Path.cwd() == CHECKOUT else []
_BEGIN_TIMEOUT_S = 60
_SHOWN_BYTES = 8000
"""The end of what a rank printed that is shown where its case fails."""
Outcome = tuple[bool, Any]
"""Whether a rank returned, and what; else the traceback."""


class RankError(AssertionError):
    """A rank failed, hung or vanished."""


class RankProcesses:
    """Ranks that wait for a case.

    Args:
        num_ranks: How many.
        collective_timeout_s: Seconds until a collective raises.
        pretends_cuda: Whether CUDA devices are pretended, which takes processes that have not imported torch.
    """

    def __init__(self, num_ranks: int, collective_timeout_s: float, pretends_cuda: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slivertune-ranks-", ignore_cleanup_errors=True)
        self._logs = [log_of(Path(self._folder.name), rank) for rank in range(num_ranks)]
        self._environment = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "LOCAL_SIZE": str(num_ranks),  # for which DeepSpeed otherwise starts numactl in each update of stage 3
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        context = mp.get_context("spawn" if pretends_cuda else "forkserver")
        if not pretends_cuda:
            context.set_forkserver_preload(_PRELOADED)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            more = rank, num_ranks, Path(self._folder.name), collective_timeout_s
            target = serve_with_devices if pretends_cuda else serve
            process = context.Process(target=target, args=(theirs, *more))
            process.start()
            theirs.close()  # so that the end of the process is the end of the connection
            self._connections.append(ours)
            self._processes.append(process)

    def begin(self) -> list[str]:
        """Let the ranks forget the case before, if there was one.

        Returns:
            Names of state that it left behind for good, so that these ranks must not take another.
        """
        environment = pickle.dumps({"OMP_NUM_THREADS": "1", **os.environ, **self._environment})
        try:
            for connection in self._connections:
                connection.send_bytes(environment)
        except OSError:
            return ["a rank that ended"]
        answers = self._collect(_BEGIN_TIMEOUT_S)
        return sorted({name for each in answers for name in (["a rank that ended or hangs"] if each is None else each)})

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, may_die: Collection[int]
    ) -> list[Any]:
        """Run a case after `begin`, as `run_ranks` says; if it fails, no rank is left.

        Args:
            function: What to run.
            args: After the rank and their number.
            timeout_s: Seconds until a rank that has not returned counts as hung.
            may_die: Ranks that may vanish.

        Returns:
            The result of each rank.

        Raises:
            RankError: With what each rank that failed says of it.
        """
        message = pickle.dumps((function, args))
        printed = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        for connection in self._connections:
            connection.send_bytes(message)
        outcomes: list[Outcome | None] = self._collect(timeout_s, may_die)
        failures = [
            f"rank {rank} {self._fate(rank, outcome, timeout_s)}{_end_of(self._logs[rank], printed[rank])}"
            for rank, outcome in enumerate(outcomes)
            if not (rank in may_die if outcome is None else outcome[0])
        ]
        if failures:
            self.close()
            arguments = ", ".join(map(repr, args))
            raise RankError("\n".join([f"{function.__qualname__}({arguments:.300})", *failures]))
        return [None if outcome is None else outcome[1] for outcome in outcomes]

    def _collect(self, timeout_s: float, may_die: Collection[int] = ()) -> list[Any]:
        """Receive an answer of each rank; None where it vanished, hangs, or may die and has not answered."""
        answers: list[Any] = [None] * len(self._connections)
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        while not set(waiting.values()) <= set(may_die):
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
        return answers

    def _fate(self, rank: int, outcome: Outcome | None, timeout_s: float) -> str:
        if outcome is not None:
            return f"failed:\n{outcome[1]}"
        process = self._processes[rank]
        if process.exitcode is not None:
            return f"vanished (exit code {process.exitcode})"
        os.kill(process.pid, signal.SIGUSR1)  # prints where it is
        process.join(0.5)
        return f"did not return within {timeout_s} s"

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()


def _end_of(log: Path, start: int) -> str:
    """The end of what was printed since the log had so many bytes."""
    text = log.read_bytes()[start:][-_SHOWN_BYTES:].decode(errors="replace").strip()
    return f"\nand printed:\n{text}" if text else ""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
