"""Says, once a group, that a batch did not reach it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from slivertune.hift.groups import Group


class SkipNotices:
    """Warns of groups whose turn passes without an update.

    Args:
        groups: All groups, by index.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._warned_of_skip: set[int] = set()
        self._warned_of_cycle: set[int] = set()

    def skipped(self, group: int) -> None:
        """A step of this group has passed, because no gradient reached it."""
        if group not in self._warned_of_skip:
            self._warned_of_skip.add(group)
            warnings.warn(
                f"no gradient reached group {group} ({_names(self._groups[group])}): its turn passes without an "
                "update; optimizer.skipped_turns counts such steps, and this warning comes once a group",
                UserWarning,
                stacklevel=5,
            )

    def unreached(self, groups: Sequence[int]) -> None:
        """No batch of a whole cycle has reached these groups."""
        for group in groups:
            if group not in self._warned_of_cycle:
                self._warned_of_cycle.add(group)
                warnings.warn(
                    f"no batch of a whole cycle reached group {group}, so it is not trained: "
                    f"{', '.join(self._groups[group].parameter_names)}. If the loss does not depend on them, freeze "
                    "them before HiFT is built; if they only now and then have a gradient, put them into one layer "
                    "with others by layers=, or raise layers_per_group",
                    UserWarning,
                    stacklevel=5,
                )


def _names(group: Group) -> str:
    first, *others = group.parameter_names
    return f"{first} and {len(others)} more" if others else first
