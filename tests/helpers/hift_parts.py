"""Reach the parts of a HiFT by their class."""

from typing import TypeVar

from slivertune import HiFT
from slivertune.hift.parts import Part

AnyPart = TypeVar("AnyPart", bound=Part)


def part_of(hift: HiFT, kind: type[AnyPart]) -> AnyPart:
    """Return the part of a class; a HiFT without one fails the test."""
    (found,) = [each for each in hift.turns.parts if isinstance(each, kind)]
    return found
