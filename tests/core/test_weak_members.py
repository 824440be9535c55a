import gc
import threading

from slivertune.core.weak_members import WeakMembers, add_member, discard_member, is_member, living


class Member:
    """Something that can be referred to weakly."""


def test_members_are_held_weakly_once_and_in_order() -> None:
    members: WeakMembers[Member] = {}
    first, second, third = Member(), Member(), Member()
    for member in (first, second, first, third):
        add_member(members, member)
    assert living(members) == [first, second, third]
    assert is_member(members, first) and not is_member(members, Member())
    discard_member(members, second)
    discard_member(members, second)
    assert living(members) == [first, third] and not is_member(members, second)
    del first, member
    gc.collect()
    assert living(members) == [third] and len(members) == 1


def test_members_may_come_and_go_while_they_are_asked() -> None:
    members: WeakMembers[Member] = {}
    kept = [Member() for _ in range(8)]
    for member in kept:
        add_member(members, member)
    new = []
    for number, _ in enumerate(living(members)):
        discard_member(members, kept[number])
        new.append(Member())
        add_member(members, new[-1])
    assert living(members) == new


def test_another_thread_may_add_and_drop_members() -> None:
    members: WeakMembers[Member] = {}
    ends = threading.Event()

    def churn() -> None:
        while not ends.is_set():
            some = [Member() for _ in range(50)]
            for member in some:
                add_member(members, member)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(3000):
            assert all(type(each) is Member for each in living(members))
    finally:
        ends.set()
        thread.join()
    gc.collect()
    assert living(members) == []
