import gc
import threading

from slivertune.core.weak_members import WeakMembers


class Member:
    """Something that can be referred to weakly."""


def test_members_are_held_weakly_once_and_in_order() -> None:
    members: WeakMembers[Member] = WeakMembers()
    first, second, third = Member(), Member(), Member()
    for member in (first, second, first, third):
        members.add(member)
    assert members.living() == [first, second, third] and first in members and Member() not in members
    members.discard(second)
    members.discard(second)
    assert members.living() == [first, third] and second not in members
    del first, member
    gc.collect()
    assert members.living() == [third]


def test_members_may_come_and_go_while_they_are_asked() -> None:
    members: WeakMembers[Member] = WeakMembers()
    kept = [Member() for _ in range(8)]
    for member in kept:
        members.add(member)
    new = []
    for number, _ in enumerate(members.living()):
        members.discard(kept[number])
        new.append(Member())
        members.add(new[-1])
    assert members.living() == new


def test_another_thread_may_add_and_drop_members() -> None:
    members: WeakMembers[Member] = WeakMembers()
    ends = threading.Event()

    def churn() -> None:
        while not ends.is_set():
            some = [Member() for _ in range(50)]
            for member in some:
                members.add(member)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(3000):
            assert all(type(each) is Member for each in members.living())
    finally:
        ends.set()
        thread.join()
    gc.collect()
    assert members.living() == []
