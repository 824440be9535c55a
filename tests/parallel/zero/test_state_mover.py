"""Copies of masters and state beside the computation, under ZeRO: as late as they may be, no bit changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.hift import prefetch
from slivertune.parallel.zero.schedule import GroupSchedule
from slivertune.parallel.zero.state_mover import StateMover
from tests.helpers.delayed_streams import DelayedStreams, delayed
from tests.helpers.models import differing
from tests.helpers.ranks import quick, ran_once, run_ranks
from tests.parallel.contract.hift import CYCLE, HiFTCase
from tests.parallel.contract.runs import ZERO, Run, load, running, save
from tests.parallel.zero.test_memory import state_tensors

DEVICE = torch.device("cpu")
LARGE = 10**9
STEPS, CUT = 2 * CYCLE + 2, CYCLE + 2


# One mover, over what stands in for stage 3's optimizer.


def zero_optimizer(num_elements: int, value: float) -> Any:
    """Two masters of a kind of ZeRO-3's optimizer, one moment each, and the methods through which both are read."""
    masters = [torch.full((num_elements,), value), torch.full((num_elements + 8,), value)]
    state = {master: {"exp_avg": torch.full_like(master, value / 2), "step": torch.tensor(3.0)} for master in masters}
    readers = ("step", "state_dict", "load_state_dict", "refresh_fp32_params", "offload_states", "reload_states")
    of_stage_3 = ("get_full_hp_param", "set_full_hp_param", "get_local_fp32_param", "set_local_hp_param")

    def read(*ignored: Any) -> list[torch.Tensor]:
        return [each.clone() for master in masters for each in (master.data, state[master]["exp_avg"].data)]

    return SimpleNamespace(
        fp32_partitioned_groups_flat=masters,
        fp16_partitioned_groups_flat=[torch.zeros(1)],
        grad_partitions_flat_buffer=None,
        optimizer=SimpleNamespace(state=state),
        **dict.fromkeys((*readers, *of_stage_3), read),
    )


def is_whole(found: list[torch.Tensor], value: float) -> bool:
    return all(bool((each == expected).all()) for each, expected in zip(found, [value, value / 2] * 2, strict=True))


def parked(streams: DelayedStreams, *optimizers: Any) -> list[StateMover]:
    """Their movers, with all that waits on the host."""
    movers = [StateMover(each, 3, streams) for each in optimizers]
    for mover in movers:
        mover.to_host()
        mover.release()
    return movers


READERS = [name for name, each in vars(zero_optimizer(8, 1.0)).items() if callable(each)]


@pytest.mark.parametrize("reader", [*READERS, "masters"])
@pytest.mark.parametrize("is_on_device", [True, False])
def test_whoever_reads_masters_or_state_waits_for_their_copies(reader: str, is_on_device: bool) -> None:
    streams, optimizer = DelayedStreams(DEVICE), zero_optimizer(64, 2.0)
    plain = optimizer.step
    mover = StateMover(optimizer, 3, streams)
    mover.to_host()
    if is_on_device:
        mover.release()
        mover.to_device()
    assert not is_whole(plain(), 2.0), "it came at once, so nothing is tested"
    if reader == "masters":
        assert is_whole([each for master in mover.masters for each in (master.data, master.data / 2)], 2.0)
    else:
        assert is_whole(getattr(optimizer, reader)(), 2.0)


def test_memory_that_is_given_up_has_been_copied() -> None:
    streams, optimizer = DelayedStreams(DEVICE), zero_optimizer(64, 2.0)
    mover = StateMover(optimizer, 3, streams)
    before = [master.data_ptr() for master in optimizer.fp32_partitioned_groups_flat]
    mover.to_host()
    waiting = [master.data for master in optimizer.fp32_partitioned_groups_flat]
    assert all(a.data_ptr() != b for a, b in zip(waiting, before, strict=True))
    assert mover.leaving_bytes() == 2 * 4 * (64 + 72) and streams.num_late == 0
    mover.release()
    assert mover.leaving_bytes() == 0 and streams.num_late == 1
    assert is_whole(optimizer.step(), 2.0)


def test_groups_of_one_form_use_the_same_memory_and_the_computation_does_not_wait() -> None:
    streams, optimizers = DelayedStreams(DEVICE), [zero_optimizer(64, 2.0), zero_optimizer(64, 4.0)]
    first, second = parked(streams, *optimizers)
    first.to_device()
    first.wait()
    places = {each.data_ptr() for each in state_of(optimizers[0])}
    late = streams.num_late
    first.to_host()
    second.to_device(first)
    assert {each.data_ptr() for each in state_of(optimizers[1])} == places and first.leaving_bytes() == 0
    assert streams.num_late == late
    assert is_whole(optimizers[1].step(), 4.0)
    assert is_whole(optimizers[0].step(), 2.0)


@pytest.mark.parametrize("sizes", [(64, 64), (64, 40), (40, 64), (64, 72)])
def test_two_groups_state_is_never_on_the_device_unless_it_may_be(sizes: tuple[int, int]) -> None:
    streams, optimizers = DelayedStreams(DEVICE), [zero_optimizer(each, 2.0) for each in sizes]
    num_bytes = [2 * 4 * (2 * each + 8) for each in sizes]
    first, second = parked(streams, *optimizers)
    streams.synchronize()
    first.to_device()
    first.wait()
    for beside in (False, True):
        with Ledger() as ledger:
            ledger.track(state_of(optimizers[0]))
            first.to_host()
            assert second.offloaded_bytes() == num_bytes[1]
            second.to_device(None if beside else first)
            second.wait()
            streams.synchronize()
            assert ledger.highest.state == (sum(num_bytes) if beside else max(num_bytes))
            first.release()
            assert ledger.current().state == num_bytes[1]
            second.to_host()
            first.to_device(second)
            first.wait()


def test_what_leaves_before_anybody_has_read_it_leaves_after_it_has_come() -> None:
    streams, optimizer = DelayedStreams(DEVICE), zero_optimizer(64, 2.0)
    (mover,) = parked(streams, optimizer)
    mover.to_device()
    mover.to_host()
    mover.release()
    assert is_whole(state_of(optimizer), 2.0)


def test_a_device_without_the_room_that_was_promised_lets_one_leave_before_the_other_comes() -> None:
    streams, optimizers = DelayedStreams(DEVICE), [zero_optimizer(64, 2.0), zero_optimizer(40, 4.0)]
    first, second = parked(streams, *optimizers)
    first.to_device()
    turns: Any = SimpleNamespace(_budget=mock.Mock(), _most_leaving_bytes=0)
    own, tried = torch.empty_strided, []

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        tried.append(first.leaving_bytes())
        if first.leaving_bytes():
            raise torch.OutOfMemoryError("no room")
        return own(*args, **kwargs)

    with mock.patch.object(torch, "empty_strided", allocate):
        GroupSchedule._move(turns, first, second, LARGE)
    assert tried == [2 * 4 * (64 + 72), 0, 0, 0, 0]
    turns._budget.fail.assert_called_once_with()
    assert turns._most_leaving_bytes == 0
    second.wait()
    assert is_whole(state_of(optimizers[1]), 4.0)


def state_of(optimizer: Any) -> list[torch.Tensor]:
    return [
        each
        for master in optimizer.fp32_partitioned_groups_flat
        for each in (master.data, optimizer.optimizer.state[master]["exp_avg"].data)
    ]


# On ranks.

CASES: dict[Layout, HiFTCase] = {
    "zero1": HiFTCase(bare=True, dtype=torch.bfloat16, clip=0.05, evaluate=True),
    "zero2": HiFTCase(bare=True, dtype=torch.bfloat16, accumulation=2, split_decay=True),
    "zero3": HiFTCase(bare=True, dtype=torch.bfloat16, eps=1e-4, settings={"layers_per_group": 2}),
}
ORDERS: dict[str, tuple[int | None, int]] = {
    "late": (None, 0),
    "late, with room": (None, LARGE),
    "drawn": (1, 0),
    "drawn, with room": (2, LARGE),
}
"""The seed of the copies' delays, and `prefetch_bytes`."""
RUNS = [(layout, order) for layout in ZERO for order in ORDERS]
QUICK: list[tuple[Layout, str]] = [("zero3", "late, with room")]
BROKEN: Layout = "zero2"
"""Where waits are left out."""
MISSING = ("wait", "memory", "host")


def with_room(case: HiFTCase, prefetch_bytes: int | str) -> HiFTCase:
    return replace(case, settings={**case.settings, "prefetch_bytes": prefetch_bytes})


def train_at_once(rank: int, num_ranks: int, layout: Layout) -> dict[str, Any]:
    """The result of a run whose copies come at once."""
    case = CASES[layout]
    with running(with_room(case, 0), layout, rank) as run:
        return case.result(run.train(0, STEPS))


def read_after_forward(rank: int, num_ranks: int, layout: Layout, late: bool) -> dict[str, torch.Tensor]:
    """The active group's masters and moments by DeepSpeed's own functions, right after the forward of its turn."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    case = with_room(CASES[layout], 0)
    with delayed(None) if late else nullcontext(), running(replace(case, evaluate=False), layout, rank) as run:
        run.train(0, CUT)  # whose last turn has ended
        run.forward(case.batch(CUT, 0, rank))
        schedule = run.model.hift_schedule
        found = {}
        for weight in run.sliver.weights_of(schedule.active):
            found[weight.name] = safe_get_full_fp32_param(weight.parameter)
            if layout == "zero3":  # stages 1 and 2 link the state in the step
                found[f"{weight.name}/exp_avg"] = safe_get_full_optimizer_state(weight.parameter, "exp_avg")
        return found


def train_late(rank: int, num_ranks: int, layout: Layout, order: str, folder: Path) -> list[dict[str, Any]]:
    """A run that is saved in mid-cycle, and one that goes on from there."""
    seed, room = ORDERS[order]
    case = with_room(CASES[layout], room)
    with delayed(seed) as made:
        with running(case, layout, rank) as run:
            save(run.train(0, CUT), folder)
            straight = case.result(run.train(CUT, STEPS))
        straight["late"] = sum(each.num_late for each in made)
        with running(case, layout, rank) as run:
            load(run, folder)
            return [straight, case.result(run.train(CUT, STEPS))]


def train_without(rank: int, num_ranks: int, missing: str) -> dict[str, Any]:
    """The result of a run whose copies come as late as they may, with a wait left out."""
    with delayed(None), without(missing), running(with_room(CASES[BROKEN], 0), BROKEN, rank) as run:
        return run.case.result(run.train(0, STEPS))


@contextmanager
def without(what: str) -> Iterator[None]:
    """Without the wait for what comes, for memory that is left, for what has to reach the host."""
    changes: dict[str, tuple[Any, str, Any]] = {
        "wait": (StateMover, "wait", lambda self: None),
        "memory": (
            StateMover,
            "_hand_over",
            lambda self, coming, own=StateMover._hand_over: (own(self, coming)[0], None),
        ),
        "host": (StateMover, "to_host", forgetful(StateMover.to_host)),
    }
    with mock.patch.object(*changes[what]):
        yield


def forgetful(to_host: Any) -> Any:
    """Without the moment at which it is done."""

    def changed(self: Any) -> None:
        to_host(self)
        self._left = None

    return changed


def hold(rank: int, num_ranks: int, layout: Layout, room: int | str) -> list[tuple[int, int]]:
    """`state_in_switches` with a `prefetch_bytes`, where all of the device is unused."""
    case = replace(CASES[layout], evaluate=False)
    unused = mock.patch.object(prefetch.PeakMemory, "unused_bytes", return_value=LARGE)
    with unused if room == "auto" else nullcontext(), running(with_room(case, room), layout, rank) as run:
        return state_in_switches(run)


def state_in_switches(run: Run) -> list[tuple[int, int]]:
    """In the second cycle: the highest bytes of state on the device in an update, and those of the group alone."""
    schedule, found = run.model.hift_schedule, []
    num_groups = run.sliver.num_groups
    run.train(0, num_groups)
    for update in range(num_groups, 2 * num_groups):
        with Ledger(run.plain) as ledger:
            ledger.track(tensor for tensor in state_tensors(schedule) if tensor.untyped_storage().nbytes())
            ledger.reset_peak()
            run.train(update, update + 1)
            found.append((ledger.highest.state, ledger.current().state))
    return found


OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def at_once() -> OnRanks:
    return ran_once(train_at_once, 2)


@pytest.fixture(scope="module")
def held() -> OnRanks:
    return ran_once(hold, 2)


@pytest.mark.parametrize(("layout", "order"), quick(RUNS, QUICK))
def test_copies_as_late_as_may_be_give_the_same_bits_also_resumed(
    layout: Layout, order: str, at_once: OnRanks, tmp_path: Path
) -> None:
    for found, expected in zip(run_ranks(train_late, 2, layout, order, tmp_path), at_once(layout), strict=True):
        assert found[0]["late"] > 20
        for each in found:
            for what in ("weights", "masters", "state"):
                assert different(each[what], expected[what]) == [], what


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Masters come with their first row."""
    return differing(*({n: e[1] if isinstance(e, tuple) else e for n, e in all_.items()} for all_ in (found, expected)))


@pytest.mark.parametrize("missing", quick(MISSING, []))
def test_a_missing_wait_changes_bits(missing: str, at_once: OnRanks) -> None:
    for found, expected in zip(run_ranks(train_without, 2, missing), at_once(BROKEN), strict=True):
        assert different(found["weights"], expected["weights"])


@pytest.mark.parametrize("layout", quick(ZERO, ["zero3"]))
def test_deepspeeds_functions_read_masters_that_are_on_their_way(layout: Layout) -> None:
    for late, at_once in zip(*(run_ranks(read_after_forward, 2, layout, late) for late in (True, False)), strict=True):
        assert at_once and all(bool(each.any()) for each in at_once.values())
        assert differing(late, at_once) == []


@pytest.mark.parametrize("layout", quick(ZERO, ["zero2"]))
def test_two_groups_are_on_the_device_only_where_there_is_room(layout: Layout, held: OnRanks) -> None:
    for alone, beside in zip(held(layout, 0), held(layout, LARGE), strict=True):
        own = [after for _, after in alone]
        assert [after for _, after in beside] == own
        # The turn before the first of these was the last group's.
        for index, (highest, after) in enumerate(alone):
            assert highest == max(after, own[index - 1])
        for index, (highest, after) in enumerate(beside):
            assert highest == after + own[index - 1]


def test_auto_takes_what_the_first_cycle_has_left(held: OnRanks) -> None:
    assert held(BROKEN, "auto") == held(BROKEN, LARGE)
