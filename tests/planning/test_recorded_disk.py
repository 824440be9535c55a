"""Reads and writes of groups' files as they are recorded, against those of real threads and files."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from slivertune import HiFT, HiFTConfig
from slivertune.core.copy_streams import Event
from slivertune.hift.disk import Disk, disks_made_by
from slivertune.hift.group_image import GroupImage
from slivertune.planning.cards import Rates
from slivertune.planning.hift_schedule import HiFTSchedule, record_hift
from slivertune.planning.make import make_plan
from slivertune.planning.planned_time import plan_time
from slivertune.planning.recorded_disk import RecordedDisk
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Begin, FileTransfer, Record, Synchronize, Transfer, Wait, Work
from slivertune.planning.schedule_player import exposed_share
from slivertune.planning.schedule_recorder import ScheduleRecorder
from tests.planning.test_hift_schedule import NUM_GROUPS, NUM_PARAMETERS, TINY, in_cycle

Moved = list[tuple[str, int]]
"""Threads, and the bytes that they moved."""


def request_of(**settings: Any) -> PlanRequest:
    given = {"precision": "mixed_hi", "seq_length": 32, "stream_bytes": 2**17, "state": "disk"}
    return PlanRequest(**{**given, **settings})


@cache
def record(**settings: Any) -> HiFTSchedule:
    return record_hift(request_of(**settings), TINY)


def moved_by(schedule: HiFTSchedule) -> Moved:
    return [(each.stream, each.num_bytes) for each in schedule.entries if isinstance(each, FileTransfer)]


class WatchedDisk(Disk):
    """Notes what is written when it is, and what is read before it is."""

    moved: Moved

    def read(self, path: Path, start: int, memory: torch.Tensor) -> Event:
        self.moved.append(("reader", memory.nbytes))
        return super().read(path, start, memory)

    def write(self, path: Path, image: GroupImage, memory: torch.Tensor, older: GroupImage | None) -> Event:
        event = super().write(path, image, memory, older)
        self.moved.append(("writer", path.stat().st_size))
        return event


def moved_for_real(folder: Path, num_steps: int, **config: Any) -> Moved:
    moved: Moved = []
    with disks_made_by(type("Noting", (WatchedDisk,), {"moved": moved})):
        model = LlamaForCausalLM(TINY).to(torch.bfloat16)
        settings = HiFTConfig(state="disk", state_dir=folder, stream_bytes=2**17, **config)
        optimizer = HiFT(model, torch.optim.AdamW, config=settings)
        for _ in range(num_steps):
            tokens = torch.randint(TINY.vocab_size, (1, 32))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return moved


@pytest.mark.parametrize("state_ram_bytes", [0, 400_000])
def test_threads_move_the_same_bytes_in_the_same_order(state_ram_bytes: int, tmp_path: Path) -> None:
    recorded = moved_by(record(state_ram_bytes=state_ram_bytes))
    # The first cycle makes the state of all groups, and is not recorded; the last turns may still be under way.
    found = moved_for_real(tmp_path, 4 * NUM_GROUPS, state_ram_bytes=state_ram_bytes)
    for thread in ("reader", "writer"):
        expected, sizes = ([size for name, size in each if name == thread] for each in (recorded, found))
        assert len(expected) >= 4
        assert expected in [sizes[start : start + len(expected)] for start in range(len(sizes))]


def test_a_cycle_writes_and_reads_all_state_once() -> None:
    entries = in_cycle(record())
    for thread in ("reader", "writer"):
        sizes = [each.num_bytes for each in entries if isinstance(each, FileTransfer) and each.stream == thread]
        assert len(sizes) == NUM_GROUPS
        # Headers are of one page or two; data are whole pages.
        assert 12 * NUM_PARAMETERS < sum(sizes) < 12 * NUM_PARAMETERS + NUM_GROUPS * 4 * 4096


def test_groups_that_fit_into_memory_are_neither_read_nor_written() -> None:
    assert moved_by(record(state_ram_bytes=2**30)) == []
    assert len(moved_by(record(state_ram_bytes=400_000))) < len(moved_by(record()))


def events_before(entries: list[Any], place: int) -> Iterator[int]:
    """Of the waits that stand right before an entry on its stream."""
    while isinstance(entries[place - 1], Wait) and entries[place - 1].stream == entries[place].stream:
        place -= 1
        yield entries[place].event


@pytest.mark.parametrize("prefetch_bytes", [0, 2**30])
def test_files_wait_for_the_copies_and_buffers_for_the_files(prefetch_bytes: int) -> None:
    entries = list(record(prefetch_bytes=prefetch_bytes).entries)
    by_event = {each.event: place for place, each in enumerate(entries) if isinstance(each, Record)}
    written, num_reads = 0, 0
    for place, each in enumerate(entries):
        if not isinstance(each, FileTransfer):
            continue
        after = [by_event[event] for event in events_before(entries, place) if event in by_event]
        if each.stream == "writer":
            left = [entries[one - 1].num_bytes for one in after]
            # All that has left the device in this turn, and only that.
            assert all(isinstance(entries[one - 1], Transfer) and entries[one].stream == "outbound" for one in after)
            assert 0 <= each.num_bytes - sum(left) < 4 * 4096
            written = place
        else:
            num_reads += 1
            assert written + 1 in after
    assert num_reads >= NUM_GROUPS


def test_a_group_is_loaded_when_the_host_has_waited_for_its_file_which_is_read_in_the_turn_before() -> None:
    entries = in_cycle(record())
    read_in: dict[int, int] = {}
    step, phase, num_waits = -1, "", 0
    for place, each in enumerate(entries):
        if isinstance(each, Begin):
            step, phase = each.step, each.phase
        elif isinstance(each, FileTransfer) and each.stream == "reader":
            after = entries[place + 1]
            assert isinstance(after, Record)
            read_in[after.event] = step
        elif isinstance(each, Synchronize) and each.event in read_in:
            num_waits += 1
            # The end of a step is the beginning of the next turn, in which the one after it is read.
            assert phase == "step" and read_in[each.event] == step - 2
        elif isinstance(each, Transfer) and each.direction == "inbound":
            assert phase == "step", "nothing is loaded before the host has waited"
    assert num_waits == NUM_GROUPS - 2


def test_where_exact_weights_come_at_the_beginning_of_the_turn_its_file_is_waited_for_there() -> None:
    entries = in_cycle(record(waiting="int8", prefetch_bytes=2**30))
    phases = set[str]()
    phase = ""
    for each in entries:
        if isinstance(each, Begin):
            phase = each.phase
        elif isinstance(each, Transfer) and each.direction == "inbound":
            phases.add(phase)
    assert phases == {"step"}, "what is read by then is loaded ahead at once"


@pytest.mark.parametrize("state", ["host", "disk"])
def test_exact_weights_come_under_the_forward(state: str) -> None:
    """The computing stream waits for no copy to the device between the end of a step and its forward's first work."""
    entries = in_cycle(record(waiting="int8", state=state))
    inbound = {each.event for each in entries if isinstance(each, Record) and each.stream == "inbound"}
    has_left, is_stepping, num_turns = False, False, 0
    for place, each in enumerate(entries):
        if isinstance(each, Begin):
            is_stepping, has_left = each.phase == "step", False
        elif isinstance(each, Transfer) and each.direction == "outbound" and is_stepping:
            is_last = not any(
                isinstance(one, Transfer) and one.direction == "outbound"
                for one in entries[place + 1 : _next_step(entries, place)]
            )
            has_left = has_left or is_last
            num_turns += is_last
        elif isinstance(each, Wait) and has_left and each.stream == "computing":
            assert each.event not in inbound
    assert num_turns == NUM_GROUPS


def _next_step(entries: list[Any], place: int) -> int:
    begins = (at for at, each in enumerate(entries) if at > place and isinstance(each, Begin))
    return next(begins, len(entries))


def test_a_waiting_weight_is_made_dense_in_each_forward_and_again_in_the_backward_above_the_active_group() -> None:
    entries = in_cycle(record(waiting="nf4", gradient_checkpointing=True))
    num_weights = 64 * 96  # of each of the three matrices of an MLP
    # Codes, and a scale of four bytes for every 64, are read, and bf16 weights are written.
    cost = (0, num_weights // 2 + num_weights // 64 * 4 + 2 * num_weights)
    counted: dict[tuple[int, str], int] = {}
    begin = None
    for each in entries:
        if isinstance(each, Begin):
            begin = each
        elif isinstance(each, Work) and begin is not None and each.stream == "computing":
            key = (begin.group, begin.phase)
            counted[key] = counted.get(key, 0) + each.operators.get(cost, 0)
    for group in range(NUM_GROUPS):
        num_waiting = 3 if group in (0, NUM_GROUPS - 1) else 2
        num_above = max(0, NUM_GROUPS - 2 - group)
        assert counted[group, "forward"] == 3 * num_waiting
        # In the recomputation nothing needs what the MLP's last product gives.
        assert counted[group, "backward"] == (2 + 3) * num_above


@pytest.mark.parametrize("waiting", [None, "int8"])
@pytest.mark.parametrize("disk_duplex", ["half", "full"])
def test_where_the_disk_is_slowest_a_cycle_takes_what_it_moves(waiting: Any, disk_duplex: Any) -> None:
    bandwidth = 1e5
    rates = Rates(flops=1e15, memory_bandwidth=1e15, bus_bandwidth=1e15, disk_bandwidth=bandwidth)
    schedule = record(waiting=waiting)
    times = schedule.cycle(replace(rates, disk_duplex=disk_duplex))
    sizes = [each.num_bytes for each in in_cycle(schedule) if isinstance(each, FileTransfer)]
    # On a shared disk something is at work all the time. With the rate for each way, a buffer is either written or
    # read into, and two of them take turns, so that it is between the longer way alone and both one after the other.
    seconds = sum(time.total for time in times)
    both, one = sum(sizes) / bandwidth, sum(sizes) / 2 / bandwidth
    at_the_ends = 2 * max(sizes) / bandwidth
    assert one - at_the_ends <= seconds <= both + at_the_ends
    if disk_duplex == "half":
        assert seconds >= both - at_the_ends
    assert exposed_share(times) > 0.999
    causes = {cause.split(" after ")[-1] for time in times for (_, cause), gone in time.exposed_by.items() if gone > 1}
    assert causes <= {"reader", "writer"} and causes


def test_the_plan_waits_at_least_for_what_a_cycle_moves_and_about_as_long_as_the_simulation() -> None:
    plan = make_plan(request_of(), TINY)
    slow = Rates(flops=1e12, memory_bandwidth=1e12, bus_bandwidth=1e11, disk_bandwidth=1e8)
    planned = plan_time(plan, TINY, slow)
    bound = 2 * planned.disk_bytes_per_update / slow.disk_bandwidth
    simulated = record_hift(request_of(), TINY).cycle(slow)
    mean = sum(time.total for time in simulated) / len(simulated)
    assert planned.seconds >= bound * (1 - 1e-9)
    # The simulated cycle begins with what was read before, and ends with what is still to be written: a group each.
    assert mean == pytest.approx(bound, rel=2 / NUM_GROUPS)
    assert planned.seconds == pytest.approx(mean, rel=2 / NUM_GROUPS)
    fast = plan_time(plan, TINY, replace(slow, disk_bandwidth=1e15))
    assert "the disk" not in fast.waits


def test_what_nothing_leads_to_is_an_error_and_no_endless_wait() -> None:
    disk = RecordedDisk(ScheduleRecorder(), Path("state"), 0)
    disk.start(reader=(lambda: None, lambda: None), writer=(lambda: None, lambda: None))
    with disk.changed, pytest.raises(RuntimeError, match="waits for a read or write that nothing leads to"):
        disk.changed.wait()


def test_what_was_read_is_there_once_the_host_has_waited_for_it() -> None:
    recorder = ScheduleRecorder()
    disk, memory = RecordedDisk(recorder, Path("state"), 0), torch.empty(4)
    assert disk.has_happened(disk.read(Path("before"), 0, memory)), "all of it was before the recording"
    with recorder.recording("step", 0):
        first, second = (disk.read(Path(name), 0, memory) for name in ("first", "second"))
        assert not disk.has_happened(first) and not disk.has_happened(second)
        disk.wait_on_host(first)
        assert disk.has_happened(first) and not disk.has_happened(second)
        disk.wait_on_host(second)
        assert disk.has_happened(second)
    assert disk.has_happened(None)


def test_nothing_is_made_on_the_real_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record_hift(request_of(), TINY)
    assert list(tmp_path.iterdir()) == []
