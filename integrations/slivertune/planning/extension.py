"""Measurements of a model with many blocks, extended from those of three models with few.

The blocks of a model are alike, so each number of a step grows by the same amount per period of blocks: the bytes alive
at one place of a step, the operators of a pass, the bytes of all state. Three models, one, two and three periods apart,
show every amount twice. If the two differ, there is no extension (`ExtensionError`).

A maximum over places does not grow evenly, since another place may become the largest. Therefore a `Course` is
extended place by place, and its maximum is taken afterwards.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from slivertune.planning.course import Course
from slivertune.planning.methods import MeasuredSteps
from slivertune.planning.step_work import Work


class ExtensionError(Exception):
    """A number does not grow evenly with the blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """Distance from the smallest of three models to the one that is planned."""

    period: int
    """Blocks from one model to the next."""
    num_periods: int
    """Periods from the smallest model to the one that is planned."""

    def of(self, first: MeasuredSteps, second: MeasuredSteps, third: MeasuredSteps) -> MeasuredSteps:
        """Return what would be measured of the model that is planned.

        Args:
            first: Measurements of the smallest model.
            second: Measurements of the model with one period more.
            third: Measurements of the model with two periods more.

        Raises:
            ExtensionError: If a number does not grow evenly.
        """
        extended: MeasuredSteps = self._value("steps", (first, second, third))
        return extended

    def _value(self, name: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Course):
            return self._course(name, [each.moments for each in values])
        if isinstance(first, Work):
            return Work(*(self._counts(name, each) for each in zip(*(work.all_counts for work in values), strict=True)))
        if isinstance(first, int) and not isinstance(first, bool):
            return self._number(name, values)
        if is_dataclass(first) and not isinstance(first, type):
            return type(first)(
                **{
                    each.name: self._value(f"{name}.{each.name}", [getattr(value, each.name) for value in values])
                    for each in fields(first)
                }
            )
        if isinstance(first, Mapping):
            return self._by_place(name, values)
        if isinstance(first, Sequence) and not isinstance(first, str):
            if len({len(each) for each in values}) > 1:
                raise ExtensionError(f"{name} has {', '.join(str(len(each)) for each in values)} items")
            return tuple(self._value(f"{name}[{at}]", each) for at, each in enumerate(zip(*values, strict=True)))
        if any(each != first for each in values):
            raise ExtensionError(f"{name} is {', '.join(map(repr, values))}")
        return first

    def _number(self, name: str, values: Sequence[int]) -> int:
        first, second, third = values
        if third - second != second - first:
            raise ExtensionError(f"{name} is {first}, {second}, {third}")
        return first + self.num_periods * (second - first)

    def _counts(self, name: str, counts: Sequence[Counter[Any]]) -> Counter[Any]:
        """Extend the numbers of operators of each cost, or the costs of operators on all blocks at once."""
        common = set(counts[0]).intersection(*counts[1:])
        found = Counter({key: self._number(f"{name} {key}", [each[key] for each in counts]) for key in common})
        changing = [sorted((key, number) for key, number in each.items() if key not in common) for each in counts]
        if len({len(each) for each in changing}) > 1:
            raise ExtensionError(f"{name} has {', '.join(str(len(each)) for each in changing)} costs of their own")
        for each in zip(*changing, strict=True):
            keys, numbers = [key for key, _ in each], [number for _, number in each]
            key = tuple(self._number(name, parts) for parts in zip(*keys, strict=True))
            found[key] += self._number(f"{name} {key}", numbers)
        return found

    def _by_place(self, name: str, values: Sequence[Mapping[Any, Work]]) -> dict[Any, Work]:
        """Repeat the work of a period of blocks, and extend that of no block."""
        elsewhere = self._value(name, [each.get(None, Work()) for each in values])
        for above in range(max(0, _num_blocks(values[0]) - self.period) + 1):
            if all(_with_periods(fewer, above, self.period, 1) == _in_blocks(more) for fewer, more in pairwise(values)):
                return _with_periods(values[0], above, self.period, self.num_periods) | {None: elsewhere}
        raise ExtensionError(f"{name} differs between blocks")

    def _course(self, name: str, moments: Sequence[npt.NDArray[np.int64]]) -> Course:
        """Extend the moments of each part as they are, behind all periods that are inserted below it.

        A moment in two parts also stands for those of the inserted blocks: from the one part to the other they grow
        evenly, so that none of them is larger than both.
        """
        aligned = _Aligned(*moments)
        try:
            parts = aligned.parts()
        except ExtensionError as error:
            raise ExtensionError(f"{name}: {error}") from None
        return Course(np.concatenate([aligned.extended(part, self.num_periods) for part in parts]))


@dataclass(frozen=True, slots=True)
class _Part:
    """Moments [begin, end) of the smallest model, each of which has one more in front of it per inserted moment."""

    begin: int
    end: int
    inserted: int
    """Moments that one period inserts below this part."""


class _Aligned:
    """Courses of three models, a period apart.

    Args:
        first: Moments of the smallest model, in the form of `Course.moments`.
        second: Moments of the model with one period more.
        third: Moments of the model with two periods more.
    """

    def __init__(
        self, first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], third: npt.NDArray[np.int64]
    ) -> None:
        self._first, self._second, self._third = first, second, third
        self._inserted = len(second) - len(first)

    def parts(self) -> list[_Part]:
        """Divide the moments of the smallest model into parts, one behind each place where a period inserts moments.

        Parts overlap by as many moments as are inserted between them.
        """
        lengths = [len(each) for each in (self._first, self._second, self._third)]
        if self._inserted < 0 or lengths[2] - lengths[1] != self._inserted:
            raise ExtensionError(f"{lengths[0]}, {lengths[1]}, {lengths[2]} moments")
        parts = [self._part(0, 0)]
        while parts[-1].end < lengths[0] or parts[-1].inserted < self._inserted:
            parts.append(self._next(parts[-1]))
        return parts

    def extended(self, part: _Part, num_periods: int) -> npt.NDArray[np.int64]:
        """Return the moments of a part in a model with more periods than the smallest."""
        own = self._first[part.begin : part.end]
        growth = self._second[part.begin + part.inserted : part.end + part.inserted] - own
        extended: npt.NDArray[np.int64] = own + num_periods * growth
        return extended

    def _part(self, begin: int, inserted: int) -> _Part:
        length = len(self._first)
        rows = slice(begin, length), slice(begin + inserted, length + inserted)
        growth = self._second[rows[1]] - self._first[rows[0]]
        is_even = (self._third[begin + 2 * inserted : length + 2 * inserted] - self._second[rows[1]] == growth).all(1)
        return _Part(begin, length if is_even.all() else begin + int(is_even.argmin()), inserted)

    def _next(self, part: _Part) -> _Part:
        """Return the part behind the next place where moments are inserted, the one that reaches farthest."""
        found = [
            self._part(part.end - more, part.inserted + more)
            for more in self._candidates(part)
            if part.begin <= part.end - more
        ]
        found = [each for each in found if each.end >= part.end and self._is_straight(part, each)]
        if not found:
            raise ExtensionError(f"moment {part.end} of {len(self._first)} has none like it with more blocks")
        return max(found, key=lambda each: (each.end, -each.inserted))

    def _candidates(self, part: _Part) -> list[int]:
        """Return the numbers of moments behind which the first one after a part grows evenly, or the last one."""
        if part.end == len(self._first):
            return [self._inserted - part.inserted]
        at, inserted = part.end, np.arange(part.inserted + 1, self._inserted + 1)
        second = self._second[at + inserted]
        is_even = (self._third[at + 2 * inserted] - second == second - self._first[at]).all(1)
        return [int(each) - part.inserted for each in inserted[is_even]]

    def _is_straight(self, part: _Part, other: _Part) -> bool:
        """Return whether the moments between two parts grow evenly from one to the other."""
        begin, end, third = other.begin, part.end, self._third
        below = third[begin + 2 * part.inserted : end + 2 * part.inserted]
        between = third[begin + part.inserted + other.inserted : end + part.inserted + other.inserted]
        above = third[begin + 2 * other.inserted : end + 2 * other.inserted]
        return bool((2 * between == below + above).all())


def _in_blocks(work: Mapping[Any, Work]) -> dict[Any, Work]:
    return {place: each for place, each in work.items() if place is not None}


def _num_blocks(work: Mapping[Any, Work]) -> int:
    """Count the blocks up to the highest one, through which every backward passes."""
    return max((index + 1 for index, _ in _in_blocks(work)), default=0)


def _with_periods(work: Mapping[Any, Work], above: int, period: int, number: int) -> dict[Any, Work]:
    """Return the work of blocks, with the `period` blocks below the `above` highest ones repeated `number` times."""
    end = _num_blocks(work) - above
    found: dict[Any, Work] = {}
    for (index, is_again), each in _in_blocks(work).items():
        found[index if index < end else index + number * period, is_again] = each
        if end - period <= index < end:
            found |= {(index + times * period, is_again): each for times in range(1, number + 1)}
    return found
