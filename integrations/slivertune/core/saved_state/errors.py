"""What a saved state is refused with, and what is checked of it first."""

from collections.abc import Mapping, Sequence
from typing import Any


class StateMismatchError(ValueError):
    """A saved state is of another model, grouping, selection or optimizer, or is damaged."""


def check_header(saved: Mapping[str, Any], method: str, title: str, versions: Sequence[int]) -> None:
    """Check that a state is one of a method, in a form that can be read, before anything of it is used.

    Args:
        saved: The state.
        method: Key of its header.
        title: The method's name in messages.
        versions: Of the forms that can be read.

    Raises:
        StateMismatchError: Naming what is missing or damaged.
    """
    for key in ("state", "param_groups", method):
        if key not in saved:
            raise StateMismatchError(
                f"this is no state of {title}: it has no {key!r}; save one with optimizer.state_dict()"
            )
    header = saved[method]
    if header.get("version") not in versions:
        raise StateMismatchError(
            f"the saved state has version {header.get('version')!r}, this library reads "
            f"{' and '.join(map(str, versions))}; continue with the version that wrote it"
        )
    updates = header.get("updates")
    if not isinstance(updates, int) or updates < 0:
        raise StateMismatchError(f"the saved state is damaged: updates={updates!r}; use another checkpoint")
