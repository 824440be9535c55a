"""Headers: messages of constant size in which ranks compare their positions before they exchange anything else.

Otherwise, ranks that are out of step would average gradients of different layers if the sizes happen to match, and
abort if they don't.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple


class Stage(IntEnum):
    """Joint action that a rank is about to begin."""

    FORWARD = 0
    GRADIENT_SYNC = 1
    STEPPING = 2
    COMPARING = 3
    SAVING = 4


TEXTS: Mapping[int, str] = {
    Stage.FORWARD: "beginning a forward pass",
    Stage.GRADIENT_SYNC: "averaging gradients",
    Stage.STEPPING: "stepping the optimizer",
    Stage.COMPARING: "comparing weights and settings",
    Stage.SAVING: "saving or ending the training",
}
"""Descriptions of the stages, for messages."""

NO_GROUP = -1
"""Group number of a method without groups."""

UNKNOWN = -1
"""Value of `gradients` or `last_batch` if it is not known yet."""


class Header(NamedTuple):
    """Position of a rank in the run, always the same number of integers."""

    stage: int
    """`Stage` that the rank is about to begin."""
    update: int
    """Number of updates applied so far."""
    group: int = NO_GROUP
    """Index of the active group."""
    skipped: int = 0
    """Number of steps without an update."""
    gradients: int = UNKNOWN
    """Whether the active group has a gradient, 0 or 1."""
    last_batch: int = UNKNOWN
    """Whether the loader has given its last batch, 0 or 1."""
    settings: int = 0
    """`short_hash` of the learning rates and other hyperparameters of the coming update."""

    def text(self) -> str:
        """Describe the position for messages."""
        place = f"{TEXTS[self.stage]} at update {self.update}"
        if self.group != NO_GROUP:
            place += f", group {self.group}"
        if self.skipped:
            place += f", {self.skipped} turns skipped"
        if self.gradients != UNKNOWN:
            place += ", with gradients" if self.gradients else ", without a gradient"
        if self.last_batch == 1:
            place += ", on the last batch of its loader"
        return place


def find_difference(headers: Sequence[Header]) -> str | None:
    """Describe how the ranks' positions differ. Return None if they agree. Settings are ignored.

    Args:
        headers: Headers of all ranks.
    """
    places = [header._replace(settings=0) for header in headers]
    if all(place == places[0] for place in places):
        return None
    shown = [f"rank {rank} is {place.text()}" for rank, place in enumerate(places)]
    if len(shown) > 8:
        odd = [line for line, place in zip(shown, places, strict=True) if place != places[0]]
        return "; ".join([shown[0], *odd[:7], f"... ({len(places)} ranks)"])
    return "; ".join(shown)


def short_hash(settings: Mapping[str, object]) -> int:
    """Hash plain values to an integer that fits into a header.

    Args:
        settings: Values by name.

    Returns:
        A hash below 2^63.
    """
    summary = hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=8)
    return int.from_bytes(summary.digest(), "big") >> 1
