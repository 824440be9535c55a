"""Coordinates the processes of a run: decisions by the first process, waiting for each other, and error reports.

They communicate through the store at their launcher's address. The store works before torch.distributed is
initialised, and has no timeout that a long preparation could exceed.
"""

import os
import pickle
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from slivertune.core.masking import masked
from slivertune.parallel.consistency.processes import let_threads_finish_at_exit

_Value = TypeVar("_Value")

_POLL_S = 0.05
_JOIN_TIMEOUT = timedelta(minutes=10)
"""Time in which all processes must start."""
_PATIENCE_S = 5.0
"""Seconds that a failing process waits for the first process to report the same error."""
_START_PATIENCE_S = 120.0
"""Seconds of this wait before training, when all processes meet the same errors but one may be far behind."""
_NUM_SHOWN = 4


class SilentError(Exception):
    """An error of another process, which reports it, so that this process prints nothing."""


class LaunchCoordinator:
    """One of a run's processes, which can communicate with the others.

    Args:
        rank: Number of this process.
        world_size: Number of processes.
        local_rank: Number of this process on its machine.
        store: Key-value store that all processes share; None for a single process.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0, store: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_first = rank == 0
        """Whether this process prints, decides and writes."""
        self.name = "" if world_size == 1 else f" on rank {rank}"
        """Suffix of error messages, such as " on rank 1". It is empty for a single process."""
        self._local_rank = local_rank
        self._store = store
        self._stage = 0

    def agree_on(self, name: str, value: Any) -> None:
        """Check that a value is the same on all processes.

        Args:
            name: Name of the value.
            value: Value of this process, compared by `==`.

        Raises:
            ValueError: If values differ from the first process's; raised on every process, with secrets masked.
        """
        if self._store is None:
            return
        # Each process masks its own value: the others do not know its secrets.
        self._put(f"{name}/{self.rank}", (value, masked(value)))
        values, shown = zip(*(self._wait_for(f"{name}/{rank}") for rank in range(self.world_size)), strict=True)
        others = [f"rank {rank} {shown[rank]!r}" for rank, each in enumerate(values) if each != values[0]]
        if others:
            listed = ", ".join(others if len(others) <= _NUM_SHOWN else [*others[:_NUM_SHOWN], "..."])
            raise ValueError(
                f"the processes were given different {name}: rank 0 {shown[0]!r}, {listed}. Start all of them alike"
            )

    def decide(self, name: str, choose: Callable[[], _Value]) -> _Value:
        """Let the first process choose a value for all.

        Args:
            name: Name of the choice, unique in a run.
            choose: Function that the first process alone calls; its result must be picklable.

        Raises:
            SilentError: On the other processes, if the first one failed.
        """
        return self._led(name, choose, leads=self.is_first, is_shared=True)

    def first_here(self, name: str, do: Callable[[], _Value]) -> _Value:
        """Call a function that leaves files behind: first on one process per machine, then on the others.

        Args:
            name: Name of the work, unique in a run.
            do: Function that all processes call.

        Raises:
            SilentError: On the other processes, if the first one of their machine failed.
        """
        is_led = self._local_rank > 0
        done: _Value = self._led(f"{name} on {socket.gethostname()}", do, leads=not is_led, is_shared=False)
        return do() if is_led else done

    def reach(self, stage: int) -> None:
        """Record that this process has reached a stage: 1 (its arguments are valid) or 2 (it is ready to train).

        Args:
            stage: Number of the stage.
        """
        self._stage = stage
        if self.is_first:
            self._put(f"stage/{stage}", True)

    def owns_error(self, text: str) -> bool:
        """Return whether this process reports its error. Call it once, and then `publish_error`.

        The first process always does. Another one waits to see whether the first reports the same error.

        Args:
            text: Error message.
        """
        if self._store is None or self.is_first:
            return True
        deadline = time.monotonic() + (_START_PATIENCE_S if self._stage < 2 else _PATIENCE_S)
        # The store may end with the process that serves it.
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                if self._store.check(["error"]):
                    return bool(pickle.loads(self._store.get("error")) != text)
                if self._store.check([f"stage/{self._stage + 1}"]):
                    break
                time.sleep(_POLL_S)
        return True

    def await_error_report(self) -> None:
        """Wait until the first process has reported its error: a launcher ends all processes once one has ended."""
        self.owns_error("")

    def publish_error(self, text: str) -> None:
        """Publish the first process's error, and give the others 1 s to read it before this process ends."""
        if self._store is not None and self.is_first:
            self._put("error", text)
            time.sleep(1.0)

    def _led(self, name: str, do: Callable[[], _Value], *, leads: bool, is_shared: bool) -> _Value:
        """Call a function on one process while the others wait. If `is_shared`, return its result on all."""
        if not leads:
            has_succeeded, shared = self._wait_for(name)
            if not has_succeeded:
                raise SilentError(f"another process failed in: {name}")
            return cast(_Value, shared)
        told: tuple[bool, Any] = (False, None)
        try:
            value = do()
            told = (True, value if is_shared else None)
        finally:
            self._put(name, told)
        return value

    def _put(self, name: str, value: Any) -> None:
        if self._store is not None:
            self._store.set(name, pickle.dumps(value))

    def _wait_for(self, name: str) -> Any:
        while not self._store.check([name]):
            time.sleep(_POLL_S)
        return pickle.loads(self._store.get(name))


def join_launch() -> LaunchCoordinator:
    """Find the other processes of this run, if a launcher has started several.

    Returns:
        The coordinator of this process.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return LaunchCoordinator()
    let_threads_finish_at_exit()
    rank = int(os.environ["RANK"])
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=_JOIN_TIMEOUT))
    return LaunchCoordinator(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), PrefixStore("slivertune", store))
