"""Objects that are held weakly and are asked one after the other."""

import weakref
from typing import Generic, TypeVar

_Member = TypeVar("_Member")


class WeakMembers(Generic[_Member]):
    """Members that may join, leave or end at any moment, in any thread, also while they are asked.

    A `weakref.WeakSet` raises RuntimeError if another thread, or a finalizer that the garbage collector runs, changes
    it during an iteration.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[_Member]] = {}

    def add(self, member: _Member) -> None:
        """Hold a member weakly. Do nothing if it is one."""
        if member not in self:
            key = id(member)
            self._references[key] = weakref.ref(member, lambda ended: self._forget(key, ended))

    def discard(self, member: _Member) -> None:
        """Let a member go. Do nothing if it is none."""
        if member in self:
            self._references.pop(id(member), None)

    def living(self) -> list[_Member]:
        """Return the members that live now, in the order in which they joined."""
        # Nothing runs between the entries of such a copy: neither another thread nor the garbage collector.
        references = list(self._references.values())
        return [member for reference in references if (member := reference()) is not None]

    def __contains__(self, member: object) -> bool:
        reference = self._references.get(id(member))
        return reference is not None and reference() is member

    def _forget(self, key: int, ended: "weakref.ref[_Member]") -> None:
        if self._references.get(key) is ended:
            self._references.pop(key, None)
