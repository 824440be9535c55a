"""Whether all ranks do the same: compared before training, once a cycle, and looked up when a collective fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LOOKUP_TIMEOUT = timedelta(seconds=5)
"""How long to wait for the word of a rank when a collective has failed."""


def world_size() -> int:
    """Processes that train together; 1 where nothing was initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_agreement(facts: Mapping[str, object]) -> None:
    """Compare what every rank must share. A collective: all ranks call it together.

    Args:
        facts: Plain values by name, compared by `==`.

    Raises:
        ValueError: On every rank, naming the first fact that differs and its value on each rank.
    """
    if world_size() == 1:
        return
    gathered: list[dict[str, object]] = [{} for _ in range(world_size())]
    dist.all_gather_object(gathered, dict(facts))
    names = list(dict.fromkeys(name for each in gathered for name in each))
    for name in names:
        values = [each.get(name) for each in gathered]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"the ranks disagree on {name}: {_by_rank(values)}; start every process with the same script, "
                "arguments and seed"
            )


class Whereabouts:
    """Keeps track of where this rank is in the run, so that a collective that fails can say who is missing.

    Notes go to the process group's store, one small message an update; nothing is written on one process.

    Args:
        name: What the notes are about; each instance of a run needs its own.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"slivertune/{name}"
        self._store: Any = None
        if world_size() > 1:
            # There is no public way to the store that every process group has; torchrun's own agent uses this one.
            self._store = dist.distributed_c10d._get_default_store()
        self._own = "at the start"

    def enter(self, update: int, what: str) -> None:
        """Note that this rank works on an update.

        Args:
            update: Updates applied so far.
            what: The group, or the phase.
        """
        self._own = f"at update {update}, {what}"
        if self._store is not None:
            self._store.set(self._key(dist.get_rank()), self._own)

    @contextmanager
    def guard(self, doing: str, *, computes: bool = False) -> Iterator[None]:
        """Do a collective; if it fails, say which ranks are somewhere else.

        Args:
            doing: What the collective is for, as in "averaging the gradients of group 2".
            computes: Whether other work is done beside it, whose errors are to stay as they are.

        Raises:
            RuntimeError: If it failed or timed out, with the whereabouts of all ranks.
        """
        try:
            yield
        except RuntimeError as error:
            if self._store is None or (computes and not _is_of_a_collective(error)):
                raise
            raise RuntimeError(f"rank {dist.get_rank()} failed {doing}: {self._explain()} ({error})") from error

    def compare(self, fingerprint: Mapping[str, object]) -> None:
        """Check that no rank has drifted. A collective: all ranks call it together, with the same names.

        Args:
            fingerprint: Plain values by name; cheap to make, such as a `digest` of positions.

        Raises:
            RuntimeError: On every rank, naming what differs and its value on each rank.
        """
        if self._store is None:
            return
        with self.guard("comparing the ranks"):
            gathered: list[dict[str, object]] = [{} for _ in range(world_size())]
            dist.all_gather_object(gathered, dict(fingerprint))
        for name in dict.fromkeys(name for each in gathered for name in each):
            values = [each.get(name) for each in gathered]
            if any(value != values[0] for value in values):
                raise RuntimeError(
                    f"the ranks have drifted apart, {self._own}: {name} is {_by_rank(values)}; what they trained since "
                    "the last checkpoint is not to be trusted: resume from it"
                )

    def _explain(self) -> str:
        places = []
        for rank in range(world_size()):
            if rank == dist.get_rank():
                continue
            try:
                self._store.wait([self._key(rank)], _LOOKUP_TIMEOUT)
                place = self._store.get(self._key(rank)).decode()
            except RuntimeError:
                # The store's own rank is gone, or that rank never came so far.
                place = "gone, or never here"
            places.append(f"rank {rank} was last seen {place}")
        return f"this rank is {self._own}; {', '.join(places)}; a rank that stays behind has died or has other settings"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A short hash of some tensors' names and bits.

    Args:
        tensors: By name; copied to the host, so keep them few or small.

    Returns:
        16 hexadecimal digits.
    """
    summary = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        summary.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        summary.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def comparable(value: Any) -> object:
    """A setting in a form that ranks can send and compare: tensors by their content, other objects by their text."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    return value if isinstance(value, (type(None), bool, int, float, str)) else repr(value)


def _is_of_a_collective(error: RuntimeError) -> bool:
    # Gloo has no class of errors of its own; its messages begin with the file that they come from.
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def _by_rank(values: list[object]) -> str:
    shown = [f"{value!r} on rank {rank}" for rank, value in enumerate(values)]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:8], f"... ({len(shown)} ranks)"])
