"""What was passed to `slivertune.prepare`, taken apart and put together again."""

from collections.abc import Mapping, Sequence
from typing import Any


def replace_each(accelerator: Any, objects: Sequence[Any], prepared: Mapping[int, Any]) -> tuple[Any, ...]:
    """Put what was prepared in its place, and let the Accelerator prepare all else (loaders, schedulers).

    Args:
        accelerator: Holds the prepared optimizer already, so that schedulers find it.
        objects: As they were passed.
        prepared: What to put in an object's place, by the object's id.
    """
    rest = [each for each in objects if id(each) not in prepared]
    others = accelerator.prepare(*rest) if rest else ()
    following = iter(others if len(rest) > 1 else (others,))
    return tuple(prepared[id(each)] if id(each) in prepared else next(following) for each in objects)
