"""The processes of one run: what the first decides for all, who waits for whom, and which of them reports an error.

They talk through the store that their launcher's addresses lead to, and so before torch.distributed has begun, without
a timeout that a long preparation could run into.
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
"""How long a process waits for the others to start."""
_PATIENCE_S = 5.0
"""How long a failing process waits for the first to say the same."""
_START_PATIENCE_S = 120.0
"""The same before training, where all processes meet the same errors, but one may be far behind."""
_NUM_SHOWN = 4


class SilentError(Exception):
    """Another process has failed, and says why."""


class LaunchCoordinator:
    """This process among those of a run.

    Args:
        rank: Its number.
        world_size: How many there are.
        local_rank: Its number on its machine.
        store: Seen by all of them; None where it is alone.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0, store: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_first = rank == 0
        """Whether this process prints, decides and writes."""
        self.name = "" if world_size == 1 else f" on rank {rank}"
        """What to call it in an error: nothing where it is alone."""
        self._local_rank = local_rank
        self._store = store
        self._stage = 0

    def agree_on(self, name: str, value: Any) -> None:
        """Compare what all processes must share.

        Args:
            name: What it is.
            value: Compared by `==`.

        Raises:
            ValueError: On every process, with the values that differ from the first one's, without secrets.
        """
        if self._store is None:
            return
        # Each process masks its own: the others do not know its secrets.
        self._put(f"{name}/{self.rank}", (value, masked(value)))
        values, shown = zip(*(self._wait_for(f"{name}/{rank}") for rank in range(self.world_size)), strict=True)
        others = [f"rank {rank} {shown[rank]!r}" for rank, each in enumerate(values) if each != values[0]]
        if others:
            listed = ", ".join(others if len(others) <= _NUM_SHOWN else [*others[:_NUM_SHOWN], "..."])
            raise ValueError(f"the processes were given different {name}: rank 0 {shown[0]!r}, {listed}")

    def decide(self, name: str, choose: Callable[[], _Value]) -> _Value:
        """Let the first process choose for all.

        Args:
            name: What is chosen; used once in a run.
            choose: Called by the first process alone; its result can be pickled.

        Raises:
            SilentError: On the others, if it failed there.
        """
        return self._led(name, choose, leads=self.is_first, is_shared=True)

    def first_here(self, name: str, do: Callable[[], _Value]) -> _Value:
        """Let one process of each machine do something that leaves files behind, and then all others.

        Args:
            name: What is done; used once in a run.
            do: Called by all.

        Raises:
            SilentError: On those that wait, if it failed.
        """
        is_led = self._local_rank > 0
        done: _Value = self._led(f"{name} on {socket.gethostname()}", do, leads=not is_led, is_shared=False)
        return do() if is_led else done

    def reach(self, stage: int) -> None:
        """Note that this process has come so far: 1, its arguments hold together; 2, it is ready to train.

        Args:
            stage: The number.
        """
        self._stage = stage
        if self.is_first:
            self._put(f"stage/{stage}", True)

    def owns_error(self, text: str) -> bool:
        """Whether this process is the one to report how it failed; call it once, and then `publish_error`.

        The first one always is. Another waits to see whether the first reports the same.

        Args:
            text: What went wrong.
        """
        if self._store is None or self.is_first:
            return True
        deadline = time.monotonic() + (_START_PATIENCE_S if self._stage < 2 else _PATIENCE_S)
        # The store may end with its process.
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                if self._store.check(["error"]):
                    return bool(pickle.loads(self._store.get("error")) != text)
                if self._store.check([f"stage/{self._stage + 1}"]):
                    break
                time.sleep(_POLL_S)
        return True

    def await_error_report(self) -> None:
        """Wait until the first process has reported what went wrong: launchers end all others when one has ended."""
        self.owns_error("")

    def publish_error(self, text: str) -> None:
        """Tell the others what was reported, and give them a moment to read it before this process ends."""
        if self._store is not None and self.is_first:
            self._put("error", text)
            time.sleep(1.0)

    def _led(self, name: str, do: Callable[[], _Value], *, leads: bool, is_shared: bool) -> _Value:
        """Let one process do something, and all others wait for it; what it made they get only where it is shared."""
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
    """Find the other processes of this run, where a launcher has started several.

    Returns:
        This process among them.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return LaunchCoordinator()
    let_threads_finish_at_exit()
    rank = int(os.environ["RANK"])
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=_JOIN_TIMEOUT))
    return LaunchCoordinator(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), PrefixStore("slivertune", store))
