"""What ranks tell each other before they share anything: where each is, in a message whose size never differs.

Ranks that got out of step would otherwise average the gradients of different layers wherever their sizes happen to
agree, and abort where they don't.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple


class Stage(IntEnum):
    """What a rank is about to do together with the others."""

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
"""The stages, for messages."""

NO_GROUP = -1
"""The group of a method that has none."""

UNKNOWN = -1
"""Where it is not known yet whether there are gradients, or which batch is the last."""


class Header(NamedTuple):
    """Where a rank is; integers alone, the same number of them whatever the rank does."""

    stage: int
    """What it is about to do, a `Stage`."""
    update: int
    """Updates applied so far."""
    group: int = NO_GROUP
    """The group that trains."""
    skipped: int = 0
    """Steps that passed without an update."""
    gradients: int = UNKNOWN
    """Whether the group has a gradient, 0 or 1."""
    last_batch: int = UNKNOWN
    """Whether the loader has given its last batch, 0 or 1."""
    settings: int = 0
    """A `short_hash` of the learning rates and other hyperparameters of the coming update."""

    def text(self) -> str:
        """For messages."""
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
    """What to say where ranks are not at the same place; None where they are. Settings are not looked at.

    Args:
        headers: Of all ranks.
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
    """A hash of plain values that fits into a header.

    Args:
        settings: By name.

    Returns:
        Less than 2^63.
    """
    summary = hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=8)
    return int.from_bytes(summary.digest(), "big") >> 1
