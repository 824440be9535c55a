"""Courses: the bytes alive at each local maximum of a part of a step, from which its peak follows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import nn
from typing_extensions import override

from slivertune.core.ledger import Census, Ledger

_KINDS = ("parameters", "gradients", "state", "residual", "host_activations")
"""Fields of `Census` that a course has. Other bytes on the host and in files follow from what owns them."""
_ON_DEVICE = slice(0, 4)


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Bytes alive at the moments just before memory is freed, in their order. Between them memory only grows."""

    moments: npt.NDArray[np.int64]
    """Bytes by moment and kind, in the order of `_KINDS`. Shape (moments, kinds)."""

    @property
    def peak(self) -> Census:
        """Bytes alive at the first moment of the largest total on the device."""
        totals = self.moments[:, _ON_DEVICE].sum(1)
        return Census(**dict(zip(_KINDS, self.moments[totals.argmax()].tolist(), strict=True)))

    def highest_of(self, kind: str) -> int:
        """Return the largest bytes of a kind.

        Args:
            kind: Field of `Census`.
        """
        return int(self.moments[:, _KINDS.index(kind)].max())

    def with_more(self, num_bytes: Mapping[str, int]) -> "Course":
        """Return the same course beside more bytes.

        Args:
            num_bytes: Numbers of bytes by kind, negative for fewer.
        """
        moments = self.moments.copy()
        for kind, number in num_bytes.items():
            moments[:, _KINDS.index(kind)] += number
        return Course(moments)


class CourseLedger(Ledger):
    """Ledger that also records courses.

    Args:
        model: As in `Ledger`.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self._moments: list[tuple[int, ...]] = []
        self._has_grown = True

    def end_course(self) -> Course:
        """Return the course since the last call, and begin the next one with the bytes that are alive now."""
        self._bury()
        self._note()
        moments, self._moments = self._moments, []
        self._has_grown = True
        return Course(np.array(moments, dtype=np.int64))

    @override
    def _add(self, num_bytes: int, label: str) -> None:
        if num_bytes > 0:
            self._has_grown = True
        elif self._has_grown:
            self._note()
        super()._add(num_bytes, label)

    def _note(self) -> None:
        self._moments.append(tuple(self._totals[kind] for kind in _KINDS))
        self._has_grown = False
