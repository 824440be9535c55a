"""Computations that run once and are then replayed: their temporary memory follows from their sizes.

A model's blocks are alike, so SFT's search allocates the same hundred or so tensors in each block. The first search
runs under its own ledger. For all others, the bytes alive at its peak are allocated at once and freed, and its
operators are counted again. The figures of a plan stay the same.
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
    """Memory and work of a computation, beyond the memory that was allocated when it began."""

    at_peak: dict[Kind, int]
    """Bytes of each kind at the moment of the largest total."""
    most: dict[Kind, int]
    """Largest bytes of each kind, at different moments."""
    left: Any
    """Sizes of the tensors that it left."""
    work: Work
    """Work that it computed."""

    @property
    def can_be_replayed(self) -> bool:
        """Whether no earlier memory was freed or claimed during the computation."""
        return min(self.at_peak.values()) >= 0


@contextmanager
def replaying() -> Iterator[None]:
    """Replay computations inside this context. Outside, each computation runs.

    All recorded computations are forgotten at the end.
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
    """Run a computation on fake tensors, or allocate the memory that it took when it ran with the same key.

    Args:
        key: All sizes and dtypes that determine its allocations.
        there: Function that returns all tensors that it reads or may free. Memory that exists before is not counted.
        compute: Function that runs it.
        sizes_left: Function that returns the sizes of its result and of all else that it left, without any tensor.
        leave: Function that makes the same tensors again from these sizes.

    Returns:
        The result of `compute` or `leave`.
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
    """Allocate these bytes of each kind for a moment."""
    alive = []
    for kind, size in num_bytes.items():
        if size > 0:
            with claimed_at_birth(kind):
                alive.append(torch.empty(size, dtype=torch.uint8))


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorSize:
    """Size of a vector and of its storage."""

    dtype: torch.dtype
    num_elements: int
    num_bytes: int
    """Bytes of its storage, of which the vector may be a part."""

    @classmethod
    def of(cls, vector: torch.Tensor) -> "VectorSize":
        """Return the size of a vector."""
        num_bytes = vector.untyped_storage().nbytes()
        return cls(dtype=vector.dtype, num_elements=vector.numel(), num_bytes=num_bytes)

    def make(self) -> torch.Tensor:
        """Make a vector of this size."""
        return torch.empty(self.num_bytes // self.dtype.itemsize, dtype=self.dtype)[: self.num_elements]
