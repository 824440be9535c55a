"""Schedules that can be worked out by hand: a second is an operation, 4 bytes over the bus, or 2 bytes of the disk."""

from typing import Any

import pytest

from slivertune.planning.cards import Rates
from slivertune.planning.schedule import Begin, Entry, FileTransfer, Record, Synchronize, Transfer, Wait, Work
from slivertune.planning.schedule_player import StepTime, exposed_share, play

BUS = 4
DISK = 2


def rates(**changes: Any) -> Rates:
    return Rates(**{"flops": 1, "memory_bandwidth": 10, "bus_bandwidth": BUS, "disk_bandwidth": DISK, **changes})


def work(seconds: int, stream: Any = "computing") -> Work:
    return Work(stream, {(seconds, 0): 1})


def load(num_bytes: int) -> Transfer:
    return Transfer("inbound", "inbound", num_bytes)


def store(num_bytes: int) -> Transfer:
    return Transfer("outbound", "outbound", num_bytes)


def read(num_bytes: int) -> FileTransfer:
    return FileTransfer("reader", num_bytes)


def write(num_bytes: int) -> FileTransfer:
    return FileTransfer("writer", num_bytes)


def one_step(*entries: Entry, **changes: Any) -> StepTime:
    (time,) = play([Begin(0, 7, "step"), *entries], rates(**changes))
    assert time.group == 7
    return time


def test_an_operator_takes_its_operations_or_its_bytes_whichever_is_longer() -> None:
    time = one_step(Work("computing", {(2, 5): 1, (1, 30): 2}))
    assert time.total == 2 + 2 * 3 and time.exposed == 0


def test_what_only_passes_over_memory_is_fused_where_the_model_is_compiled_but_for_the_step() -> None:
    both = Work("computing", {(2, 0): 1, (0, 30): 1})
    entries = [Begin(0, 0, "forward"), both, Begin(0, 0, "step"), both]
    assert play(entries, rates())[0].seconds == {"forward": 5, "step": 5}
    assert play(entries, rates(is_compiled=True))[0].seconds == {"forward": 2, "step": 5}


def test_computation_that_waits_for_a_load_stands_still_for_it() -> None:
    time = one_step(load(8), Record("inbound", 1), Wait("computing", 1), work(1))
    assert time.total == 3 and time.exposed_by == {("step", "inbound"): 2}


def test_a_load_under_computation_costs_nothing() -> None:
    time = one_step(load(8), Record("inbound", 1), work(2), Wait("computing", 1), work(1))
    assert time.total == 3 and time.exposed == 0


def test_an_event_of_before_the_schedule_has_happened() -> None:
    assert one_step(Wait("computing", 99), work(1)).total == 1


def test_a_load_waits_for_the_room_that_a_write_back_frees_and_says_so() -> None:
    time = one_step(
        *(store(12), Record("outbound", 1)),
        *(Wait("inbound", 1), load(8), Record("inbound", 2)),
        *(Wait("computing", 2), work(1)),
    )
    assert time.exposed_by == {("step", "inbound after outbound"): 3, ("step", "inbound"): 2}


@pytest.mark.parametrize(("duplex", "seconds"), [("full", [2, 1 + 2]), ("half", [3, 4])])
def test_ways_share_the_bus_evenly_with_half_duplex_alone(duplex: str, seconds: list[int]) -> None:
    # The store begins a second later. With half duplex the load has 4 of its 8 bytes by then, and the rest at 2 bytes a
    # second; when it ends at 3, the store has 4 of its 8, and the rest at 4 bytes a second.
    both = [
        *(load(8), Record("inbound", 1)),
        *(work(1), Record("computing", 2)),
        *(Wait("outbound", 2), store(8), Record("outbound", 3)),
    ]
    for event, expected in zip((1, 3), seconds, strict=True):
        time = one_step(*both, Wait("computing", event), Work("computing", {(0, 0): 1}), duplex=duplex)
        assert time.total == expected and time.exposed == expected - 1


def test_copies_of_one_way_share_it_with_full_duplex() -> None:
    time = one_step(load(8), Transfer("computing", "inbound", 8))
    assert time.total == 4 and time.exposed == 0  # the computing stream's own copy is no standing still


def test_the_memory_of_the_host_bounds_both_ways_together() -> None:
    for host_bandwidth, seconds in ((None, 2), (2 * BUS, 2), (BUS, 4), (BUS / 2, 8)):
        time = one_step(
            *(load(8), Record("inbound", 1), store(8), Record("outbound", 2)),
            *(Wait("computing", 1), Wait("computing", 2), work(1)),
            host_bandwidth=host_bandwidth,
        )
        assert time.exposed == seconds


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 10])
@pytest.mark.parametrize("step_seconds", [0, 1, 3])
def test_pieces_pass_through_two_slots_as_a_naive_model_has_it(num_pieces: int, step_seconds: int) -> None:
    entries: list[Entry] = []

    def load_piece(index: int) -> None:
        entries.extend((Wait("inbound", 1000 + index - 2), load(8), Record("inbound", index)))

    load_piece(0)
    load_piece(1)
    for index in range(num_pieces):
        entries += [Wait("computing", index), work(step_seconds), Record("computing", 2000 + index)]
        entries += [Wait("outbound", 2000 + index), store(8), Record("outbound", 1000 + index)]
        load_piece(index + 2)
    entries += [Wait("computing", 1000 + num_pieces - 1)]

    # By recurrence: when each piece is loaded, stepped and stored.
    loaded, stepped, stored = [0], [0], [0, 0]
    for index in range(num_pieces):
        loaded.append(max(loaded[-1], stored[index]) + 2)
        stepped.append(max(stepped[-1], loaded[-1]) + step_seconds)
        stored.append(max(stored[-1], stepped[-1]) + 2)
    time = one_step(*entries)
    assert time.total == stored[-1]
    assert time.exposed == stored[-1] - num_pieces * step_seconds


def test_the_host_queues_nothing_while_it_waits_for_a_copy() -> None:
    time = one_step(load(8), Synchronize("inbound"), work(1))
    assert time.total == 3 and time.exposed_by == {("step", "host after inbound"): 2}


def test_a_copy_that_the_host_queues_after_a_read_of_the_device_begins_after_it() -> None:
    ahead = [load(4), Record("inbound", 1), work(1), Wait("computing", 1), work(1)]
    late = [work(1), Synchronize("computing"), load(4), Record("inbound", 1), Wait("computing", 1), work(1)]
    assert one_step(*ahead).exposed == 0
    assert one_step(*late).exposed == 1


def test_a_write_back_runs_under_the_next_step_and_counts_there_where_it_is_waited_for() -> None:
    first, second = play(
        [
            *(Begin(0, 0, "step"), work(1), Record("computing", 1), Wait("outbound", 1), store(12)),
            Record("outbound", 2),
            *(Begin(1, 1, "forward"), work(1), Begin(1, 1, "step"), Wait("computing", 2), work(1)),
        ],
        rates(),
    )
    assert (first.total, first.exposed) == (1, 0)
    assert second.seconds == {"forward": 1, "step": 3}
    assert second.exposed_by == {("step", "outbound"): 2}
    assert exposed_share([first, second]) == 2 / 5


def test_a_group_that_is_read_too_late_lets_the_computation_stand_still_for_the_disk_and_then_for_the_bus() -> None:
    # Four seconds of reading, one of them under computation, then two of loading.
    time = one_step(
        *(read(8), Record("reader", 1), work(1), Synchronize("reader", 1)),
        *(load(8), Record("inbound", 2), Wait("computing", 2), work(1)),
    )
    assert time.total == 4 + 2 + 1
    assert time.exposed_by == {("step", "host after reader"): 3, ("step", "inbound"): 2}


@pytest.mark.parametrize(("disk_duplex", "seconds"), [("half", [8, 7]), ("full", [5, 4])])
def test_reading_and_writing_share_the_disk_unless_it_has_its_rate_for_each(
    disk_duplex: str, seconds: list[int]
) -> None:
    # The write begins a second later. With half duplex the read has 2 of its 8 bytes by then, and the rest at a byte a
    # second; when it ends at 7, the write has 6 of its 8, and the rest at 2 bytes a second.
    both = [read(8), Record("reader", 1), work(1), Record("computing", 2), Wait("writer", 2), write(8)]
    for event, expected in zip((3, 1), seconds, strict=True):
        time = one_step(*(*both, Record("writer", 3), Wait("computing", event), work(0)), disk_duplex=disk_duplex)
        assert time.total == expected and time.exposed == expected - 1


def test_the_disk_and_the_bus_do_not_share_but_for_a_bound_on_the_hosts_memory() -> None:
    both = (read(4), Record("reader", 1), load(8), Record("inbound", 2), Wait("computing", 1), Wait("computing", 2))
    for host_bandwidth, seconds in ((None, 2), (BUS + DISK, 2), ((BUS + DISK) / 2, 4)):
        assert one_step(*both, work(1), host_bandwidth=host_bandwidth).exposed == seconds


def test_the_host_waits_for_an_event_and_not_for_what_is_queued_behind_it() -> None:
    files = (read(2), Record("reader", 1), read(20), Record("reader", 2))
    assert one_step(*files, Synchronize("reader", 1), work(1)).exposed == 1
    assert one_step(*files, Synchronize("reader", 2), work(1)).exposed == 11
    assert one_step(*files, Synchronize("reader"), work(1)).exposed == 11
    assert one_step(*files, Synchronize("reader", 99), work(1)).exposed == 0


@pytest.mark.parametrize("num_bytes", [1, 4, 5, 12])
@pytest.mark.parametrize("disk_duplex", ["half", "full"])
def test_groups_that_pass_through_two_buffers_wait_for_what_the_disk_takes_longer(
    num_bytes: int, disk_duplex: str
) -> None:
    """A turn computes 4 s; meanwhile the last group is written, and the next is read into its buffer."""
    entries: list[Entry] = []
    num_turns, computing = 30, 4
    for turn in range(num_turns):
        entries += [Begin(turn, turn, "step"), Synchronize("reader", 1000 + turn), work(computing)]
        entries += [Record("computing", 2000 + turn), Wait("writer", 2000 + turn), write(num_bytes)]
        entries += [Record("writer", 3000 + turn), Wait("reader", 3000 + turn), read(num_bytes)]
        entries += [Record("reader", 1000 + turn + 2)]
    times = play(entries, rates(disk_duplex=disk_duplex))[10:]
    # Every second turn a buffer is computed from, written and read into. On a disk that is shared, something is at work
    # all the time where that takes longer than to compute; else each way stands still while the other is at work.
    moving = 2 * num_bytes / DISK
    seconds = max(computing, moving if disk_duplex == "half" else (computing + moving) / 2)
    assert sum(time.total for time in times) / len(times) == pytest.approx(seconds)
    assert sum(time.exposed for time in times) / len(times) == pytest.approx(seconds - computing)


def test_what_waits_for_itself_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"can't end.*Wait\(stream='computing', event=1\)"):
        one_step(Wait("computing", 1), Record("computing", 1))


def test_a_schedule_begins_with_a_step() -> None:
    with pytest.raises(ValueError, match="must begin with the beginning of a step"):
        play([work(1)], rates())
