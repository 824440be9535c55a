"""Functions that run once for each size and are then replayed (`slivertune.core.sized`).

A model's blocks are alike, so SFT's search runs the same thousands of operators in each of them. The first call runs
under its own ledger. For all others, the bytes alive at its peak are allocated at once and freed, and its operators are
counted again. The figures of a plan stay the same.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slivertune.core.ledger import Kind, Ledger, claimed_as, claimed_at_birth
from slivertune.core.sized import run_by
from slivertune.planning.counter import WorkCounter
from slivertune.planning.kernels import tell_listeners
from slivertune.planning.step_work import Work

_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "state", "residual")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """Memory and work of a call, beyond the memory that was allocated when it began."""

    at_peak: dict[Kind, int]
    """Bytes of each kind at the moment of the largest total."""
    most: dict[Kind, int]
    """Largest bytes of each kind, at different moments."""
    left: "VectorSize"
    """Size of the result."""
    work: Work
    """Work that it did."""

    def again(self) -> torch.Tensor:
        """Allocate the memory for a moment, tell the work, and make a result of the same size."""
        for (flops, num_bytes), count in self.work.operators.items():
            tell_listeners(flops, num_bytes, count)
        _take(self.at_peak)
        for kind, size in self.most.items():
            if size > self.at_peak[kind]:
                _take({kind: size})
        return self.left.make()


Calls = dict[Hashable, "_Taken"]
"""Recorded calls, by all that decides what they take."""


@contextmanager
def replaying(known: Calls) -> Iterator[None]:
    """Replay the functions that `sized` declares inside this context. Outside, each call runs.

    Args:
        known: Calls that were recorded before, with the same kernels. New ones are added.
    """

    def replay(function: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
        there: list[torch.Tensor] = []
        key = (function, tuple(_size_of(each, there) for each in args))
        taken = known.get(key)
        if taken is not None:
            return taken.again()
        counter = WorkCounter()
        with Ledger() as ledger, counter.counting(None):
            ledger.track(there)
            ledger.reset_peak()
            before = ledger.current()
            result = function(*args)
        known[key] = _Taken(
            at_peak={kind: getattr(ledger.peak, kind) - getattr(before, kind) for kind in _KINDS},
            most={kind: getattr(ledger.highest, kind) - getattr(before, kind) for kind in _KINDS},
            left=VectorSize.of(result),
            work=counter.work_of(None),
        )
        return result

    with run_by(replay):
        yield


def _size_of(argument: Any, there: list[torch.Tensor]) -> Hashable:
    """Return what decides a call's memory, and note the tensors that exist before it."""
    if isinstance(argument, torch.Tensor):
        there.append(argument)
        return argument.dtype, tuple(argument.shape), claimed_as(argument)  # work on host memory takes no time
    if isinstance(argument, list | tuple):
        return tuple(_size_of(each, there) for each in argument)
    known: Hashable = argument
    return known


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
