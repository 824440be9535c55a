"""Computations that are run once and replayed: the memory that they take for a moment follows from their sizes.

A model's blocks are alike, so that SFT's search in one of them allocates what it allocated in the one before, some
hundred tensors. The first is run under a ledger of its own; for all others, what was alive at its peak is allocated at
once, and freed, and its operators are counted as they were. The figures of a plan stay the same.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from slivertune.core.ledger import Kind, Ledger, claimed_at_birth
from slivertune.planning.counter import WorkCounter
from slivertune.planning.kernels import tell_listeners
from slivertune.planning.step_work import Work

_T = TypeVar("_T")
_S = TypeVar("_S")
_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "state", "residual")
_running: list[dict[Hashable, Any]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """What a computation took, beyond what was there when it began."""

    at_peak: dict[Kind, int]
    """Bytes of each kind at the moment of the largest total."""
    most: dict[Kind, int]
    """Each kind's own largest bytes; the moments differ."""
    left: Any
    """Sizes of what it left."""
    work: Work
    """What it computed."""

    @property
    def can_be_replayed(self) -> bool:
        """Whether nothing was freed or claimed in between that was there before."""
        return min(self.at_peak.values()) >= 0


@contextmanager
def replaying() -> Iterator[None]:
    """Let computations be replayed inside; outside, each is run.

    What is known of them is forgotten at the end.
    """
    _running.append({})
    try:
        yield
    finally:
        _running.pop()


def replay(
    key: Hashable,
    there: Callable[[], Iterable[torch.Tensor]],
    compute: Callable[[], _T],
    sizes_left: Callable[[_T], _S],
    leave: Callable[[_S], _T],
) -> _T:
    """Run a computation on tensors without data, or take the memory that it took when it was run with this key.

    Args:
        key: All sizes and dtypes that decide what it allocates.
        there: Names all tensors that it reads, and those that it may free: what is there before takes nothing.
        compute: Runs it.
        sizes_left: Says of what it returned, and whatever else it left, how large that is; holds no tensor.
        leave: Makes the same anew, from these sizes.

    Returns:
        What `compute` or `leave` returned.
    """
    if not _running:
        return compute()
    known = _running[-1]
    taken: _Taken | None = known.get(key)
    if taken is None:
        counter = WorkCounter()
        with Ledger() as ledger, counter.counting(None):
            ledger.track(there())
            ledger.reset_peak()
            before = ledger.current()
            result = compute()
        known[key] = _Taken(
            at_peak={kind: getattr(ledger.peak, kind) - getattr(before, kind) for kind in _KINDS},
            most={kind: getattr(ledger.highest, kind) - getattr(before, kind) for kind in _KINDS},
            left=sizes_left(result),
            work=counter.work_of(None),
        )
        return result
    if not taken.can_be_replayed:
        return compute()
    for (flops, num_bytes), count in taken.work.operators.items():
        for _ in range(count):
            tell_listeners(flops, num_bytes)
    _take(taken.at_peak)
    for kind, size in taken.most.items():
        if size > taken.at_peak[kind]:
            _take({kind: size})
    return leave(taken.left)


def _take(num_bytes: dict[Kind, int]) -> None:
    """Have so many bytes of each kind for a moment."""
    alive = []
    for kind, size in num_bytes.items():
        if size > 0:
            with claimed_at_birth(kind):
                alive.append(torch.empty(size, dtype=torch.uint8))


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorSize:
    """How large a vector and the memory under it are."""

    dtype: torch.dtype
    num_elements: int
    num_bytes: int
    """Of its storage, of which it may be a part."""

    @classmethod
    def of(cls, vector: torch.Tensor) -> "VectorSize":
        """That of a vector."""
        num_bytes = vector.untyped_storage().nbytes()
        return cls(dtype=vector.dtype, num_elements=vector.numel(), num_bytes=num_bytes)

    def make(self) -> torch.Tensor:
        """A vector as large."""
        return torch.empty(self.num_bytes // self.dtype.itemsize, dtype=self.dtype)[: self.num_elements]
