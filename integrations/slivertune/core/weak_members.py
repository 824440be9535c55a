"""Members that are held weakly and are asked one after the other.

Members may join, leave or end at any moment, in any thread, also while they are asked. A `weakref.WeakSet` raises
RuntimeError if another thread, or a finalizer that the garbage collector runs, changes it during an iteration.
"""

import weakref
from typing import TypeAlias, TypeVar

_Member = TypeVar("_Member")
WeakMembers: TypeAlias = dict[int, weakref.ref[_Member]]
"""Weak references to members, by identity."""


def add_member(members: WeakMembers[_Member], member: _Member) -> None:
    """Hold a member weakly. Do nothing if it is one."""
    if not is_member(members, member):
        key = id(member)
        members[key] = weakref.ref(member, lambda ended: _forget(members, key, ended))


def discard_member(members: WeakMembers[_Member], member: _Member) -> None:
    """Let a member go. Do nothing if it is none."""
    if is_member(members, member):
        members.pop(id(member), None)


def is_member(members: WeakMembers[_Member], member: object) -> bool:
    """Return whether an object is a member."""
    reference = members.get(id(member))
    return reference is not None and reference() is member


def living(members: WeakMembers[_Member]) -> list[_Member]:
    """Return the members that live now, in the order in which they joined."""
    # Nothing runs between the entries of such a copy: neither another thread nor the garbage collector.
    references = list(members.values())
    return [member for reference in references if (member := reference()) is not None]


def _forget(members: WeakMembers[_Member], key: int, ended: "weakref.ref[_Member]") -> None:
    if members.get(key) is ended:
        members.pop(key, None)
