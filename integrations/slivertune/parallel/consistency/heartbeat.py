"""Comparison of the ranks before training and once per cycle, and lookup of missing ranks when a collective fails."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from slivertune.core.layout import world_size
from slivertune.core.torch_internals import default_group, default_store, process_groups, takes_cpu_tensors, timeout_of
from slivertune.parallel.accelerate_internals import is_on_last_batch
from slivertune.parallel.consistency.headers import TEXTS, UNKNOWN, Header, find_difference, short_hash
from slivertune.parallel.consistency.processes import describe_end, let_threads_finish_at_exit, own_identity

_SAME_STEPS = (
    "Every rank must make the same number of backward passes and of calls of step(). Look for a `continue`, an `if` "
    "or an exception that only some ranks meet"
)
_SAME_LAYERS = (
    "Under this layout, the loss of every rank must depend on the same layers, and no gradient may be dropped before "
    "step(). Draw LayerDrop from one seed, mix the kinds of input, or train under DDP"
)

_EXPLAINED = "_slivertune_explained"

_Value = TypeVar("_Value")

_gloo_group: list[Any] = []
"""The group beside a default one that has no CPU tensors, once it is made."""

_LOOKUP_TIMEOUT = timedelta(seconds=5)
"""Timeout for looking up a rank's note after a collective has failed."""

_SETTLING_SECONDS = 0.2
"""Seconds before a lookup: a dying process closes its connections shortly before it counts as dead."""


def check_agreement(facts: Mapping[str, object]) -> None:
    """Compare values that all ranks must share. A collective: all ranks call it together.

    Args:
        facts: Values by name, compared in the form of `comparable`.

    Raises:
        ValueError: On every rank; names the first fact that differs and its value on each rank.
        RuntimeError: If a rank has died, or exceeded the process group's timeout.
    """
    facts = {key: comparable(value) for key, value in facts.items()}
    name, by_rank = next(_differences(facts, "comparing settings"), ("", ""))
    if name:
        raise ValueError(
            f"the ranks disagree on {name}: {by_rank}. Start every process with the same script, arguments and seed"
        )


def _differences(values: Mapping[str, object], doing: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each value that differs between ranks, and its value on each rank. A collective."""
    gathered = gather_objects(values, doing)
    for name in dict.fromkeys(name for each in gathered for name in each):
        own = [each.get(name) for each in gathered]
        if any(value != own[0] for value in own):
            shown = [f"{value!r} on rank {rank}" for rank, value in enumerate(own)]
            yield name, ", ".join(shown if len(shown) <= 8 else [*shown[:8], f"... ({len(shown)} ranks)"])


def gather_objects(value: _Value, doing: str) -> list[_Value]:
    """Gather one object from every rank. A collective.

    Args:
        value: This rank's object; picklable.
        doing: Purpose of the collective, for its error.

    Returns:
        The objects by rank; only this value on one process.

    Raises:
        RuntimeError: If it fails; says where each rank was last seen.
    """
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    with guard(doing):
        dist.all_gather_object(gathered, value, group=_host_group(doing))
    return gathered


def _host_group(doing: str) -> Any:
    """Return a group of all ranks for messages of the host: the default one, or a gloo group beside it.

    NCCL sends objects through the current CUDA device, which is cuda:0 on every rank before `set_device`. Making the
    group is a collective.
    """
    group = default_group()
    if takes_cpu_tensors(group):
        return group
    if not _gloo_group or _gloo_group[0] not in process_groups():
        with guard(doing):
            _gloo_group[:] = [dist.new_group(backend="gloo", timeout=timeout_of(group))]
    return _gloo_group[0]


@contextmanager
def guard(doing: str, *, computes: bool = False) -> Iterator[None]:
    """Run a collective as `Heartbeat.guard` does, with the notes of the heartbeat made last.

    Args:
        doing: Purpose of the collective.
        computes: Whether the block does other work, too, whose errors stay unchanged.
    """
    latest = Heartbeat.latest
    if latest is None or world_size() == 1 or latest.store is not default_store():
        latest = Heartbeat("ranks")
    with latest.guard(doing, computes=computes):
        yield


class Heartbeat:
    """Records this rank's position in the run, so that a failed collective can name the missing ranks.

    Notes go to the process group's store, one small message per update. One process writes nothing.

    Args:
        name: Subject of the notes; unique for each instance in a run.
    """

    latest: ClassVar[Heartbeat | None] = None
    """Heartbeat made last, possibly for an earlier process group."""

    def __init__(self, name: str) -> None:
        self._prefix = f"slivertune/{name}"
        self.store: Any = None
        """Store of the process group. None on one process."""
        self._group: Any = None
        self._own = "at the start"
        self._first = ""
        if world_size() > 1:
            self.store = default_store()
            self.store.set(f"{self._prefix}/process/{dist.get_rank()}", own_identity())
            Heartbeat.latest = self
            let_threads_finish_at_exit()

    def enter(self, update: int, what: str) -> None:
        """Note that this rank works on an update.

        Args:
            update: Number of updates applied so far.
            what: The group or the phase.
        """
        self._own = f"at update {update}, {what}"
        if self.store is not None:
            with self.guard("noting where this rank is"):
                self.store.set(f"{self._prefix}/{dist.get_rank()}", self._own)

    @contextmanager
    def guard(self, doing: str, *, computes: bool = False) -> Iterator[None]:
        """Run a collective. If it fails, name the ranks at other positions.

        Args:
            doing: Purpose of the collective, as in "averaging the gradients of group 2".
            computes: Whether the block does other work, too, whose errors stay unchanged.

        Raises:
            RuntimeError: If it failed or timed out; says where each rank was last seen.
        """
        try:
            yield
        except RuntimeError as error:
            # Gloo has no error class of its own; its messages begin with the path of a source file.
            is_of_a_collective = isinstance(error, dist.DistError) or "gloo/" in str(error)
            if self.store is None or hasattr(error, _EXPLAINED) or (computes and not is_of_a_collective):
                raise
            raise _explained(f"rank {dist.get_rank()} failed {doing}: {self._explain()} ({error})") from error

    def meet(self, header: Header, settings: Mapping[str, object] | None = None) -> None:
        """Check that all ranks are at the same position before they exchange anything else. A fixed-size collective.

        Args:
            header: Position of this rank.
            settings: Settings of the coming update by name; plain values, compared by their hash.

        Raises:
            RuntimeError: On every rank, with each rank's position or the setting that differs; or if a rank has died or
                exceeded the process group's timeout.
        """
        if self.store is None:
            return
        is_last = is_on_last_batch()
        header = header._replace(last_batch=UNKNOWN if is_last is None else is_last)
        own = torch.tensor(header._replace(settings=short_hash(settings or {})), dtype=torch.int64, device="cpu")
        rows = own.new_empty(world_size(), own.numel())
        if self._group is None:
            # A gloo group: the host blocks in it, not the device, and it fails with an error. It is separate, so that
            # no rank mistakes this message for part of an engine's collective.
            with self.guard("making a process group"):
                self._group = dist.new_group(backend="gloo", timeout=timeout_of(default_group()))
        with self.guard(TEXTS[header.stage]):
            dist.all_gather(list(rows), own, group=self._group)
        if not self._first and dist.get_rank() != 0:  # by now every rank has stored its identity
            self._first = self._look_up(f"{self._prefix}/process/0") or ""
        if bool((rows == own).all()):
            return
        headers = [Header(*row) for row in rows.tolist()]
        difference = find_difference(headers)
        if difference is not None:
            apart = len({header._replace(gradients=UNKNOWN, settings=0) for header in headers}) > 1
            raise _explained(
                f"the ranks are not at the same place: {difference}. Nothing was shared or updated. "
                f"{_SAME_STEPS if apart else _SAME_LAYERS}, then resume from the last checkpoint"
            )
        self._compare(settings or {}, "comparing settings", "The update was not made. Set it alike on every rank")

    def compare(self, fingerprint: Mapping[str, object], header: Header | None = None) -> None:
        """Check that no rank has diverged. A collective: all ranks call it together, with the same names.

        Args:
            fingerprint: Plain values by name; cheap to compute, such as a `digest` of positions.
            header: Position of this rank, checked first.

        Raises:
            RuntimeError: On every rank; names the value that differs and shows it for each rank.
        """
        if self.store is None:
            return
        if header is not None:
            self.meet(header)
        self._compare(
            fingerprint,
            "comparing the ranks",
            "Their updates since the last checkpoint may be wrong. Resume from it",
        )

    def _compare(self, values: Mapping[str, object], doing: str, way_out: str) -> None:
        name, by_rank = next(_differences(values, doing), ("", ""))
        if name:
            raise _explained(f"the ranks have drifted apart, {self._own}: {name} is {by_rank}. {way_out}")

    def _explain(self) -> str:
        time.sleep(_SETTLING_SECONDS)
        fates, places = [], []
        for rank in (each for each in range(world_size()) if each != dist.get_rank()):
            identity = self._first if rank == 0 and self._first else self._look_up(f"{self._prefix}/process/{rank}")
            fate = describe_end(identity) if identity else None
            if fate is not None:
                fates.append(f"rank {rank} {fate}; ")
            place = self._look_up(f"{self._prefix}/{rank}")
            places.append(f"rank {rank} was last seen {place or 'nowhere: it is gone, or never started'}")
        if not fates:
            places.append("a rank that falls behind has died or has other settings")
        return f"this rank is {self._own}; {''.join(fates)}{'; '.join(places)}"

    def _look_up(self, key: str) -> str | None:
        if self._first and _is_of_rank_0(self.store) and describe_end(self._first):
            return None  # a store whose process is stopped never answers
        try:
            self.store.wait([key], _LOOKUP_TIMEOUT)
            return str(self.store.get(key).decode())
        except RuntimeError:
            # Rank 0, which serves the store, is gone, or the other rank has never written the note.
            return None


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash the names and bits of some tensors.

    Args:
        tensors: Tensors by name. They are copied to the host, so keep them few or small.

    Returns:
        16 hexadecimal digits.
    """
    summary = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        summary.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        summary.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def comparable(value: Any) -> object:
    """Convert a setting to a form that ranks can send and compare.

    A tensor becomes its content, a dictionary of tensors a hash, and any other object its text.
    """
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value)(comparable(each) for each in value) if type(value) in (list, tuple) else repr(value)
    if isinstance(value, dict) and all(isinstance(each, torch.Tensor) for each in value.values()):
        return digest(value)
    return value if isinstance(value, (type(None), bool, int, float, str)) else repr(value)


def _explained(message: str) -> RuntimeError:
    """Make an error that outer guards leave unchanged."""
    error = RuntimeError(message)
    setattr(error, _EXPLAINED, True)
    return error


def _is_of_rank_0(store: Any) -> bool:
    """Return whether rank 0 serves the store. False for torchrun's store, which its agent serves, and for a file."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    is_in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and not is_in_agent  # type: ignore[attr-defined]
