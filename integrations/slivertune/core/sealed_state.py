"""Read-only `Optimizer.state` of an optimizer that keeps its moments elsewhere. A write is an error.

Programs reset, prune or move an optimizer's state through that dictionary. If the next step does not read it, such a
write would change nothing, and nobody would know.
"""

from typing import Any, NoReturn


class SealedState(dict[Any, Any]):
    """A dictionary that refuses writes, and look-ups of parameters that it does not have.

    Args:
        entries: Initial entries.
        title: Name of the optimizer in messages.
    """

    def __init__(self, entries: dict[Any, Any], title: str) -> None:
        super().__init__(entries)
        self._title = title

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._title} does not keep its state in optimizer.state, where it can be neither reset nor changed. "
            "Save and load it by state_dict() and load_state_dict(). To go on without it, call detach() on this "
            f"{self._title} and build a new one"
        )

    __setitem__ = __delitem__ = __ior__ = __missing__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
