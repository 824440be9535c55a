import pytest

from slivertune.sft.config import SFTConfig
from slivertune.sft.schedule import Schedule
from tests.sft.reference import reselection_times

TOTAL = 100


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize(("interval", "gamma"), [(20, 5), (6, 5), (7, 1), (100, 99), (101, 4)])
def test_reselections_come_when_the_paper_says(selection: str, interval: int, gamma: int) -> None:
    config = SFTConfig(selection=selection, reselection_interval=interval, estimation_steps=gamma)
    schedule = Schedule.of(config, TOTAL)
    wanted = reselection_times(selection, TOTAL, interval, gamma)
    found = [t for t in range(1, TOTAL + 1) if schedule.next_reselection(t - 1) == t]
    assert found == wanted
    for end in wanted:
        in_phase = [t for t in range(1, TOTAL + 1) if end in schedule.open_phases(t - 1)]
        # The phase is the gamma updates up to and including the reselection.
        assert in_phase == ([] if selection == "momentum" else list(range(end - gamma + 1, end + 1)))
    assert {end for t in range(TOTAL) for end in schedule.open_phases(t)} <= set(wanted)


def test_the_first_replaces_all_and_the_others_ever_fewer() -> None:
    schedule = Schedule.of(SFTConfig(replacement_rate=0.2), TOTAL)
    assert schedule.num_replaced(5, 1000) == 1000
    assert [schedule.num_replaced(t, 1000) for t in (20, 40, 60, 80, 100)] == [160, 120, 80, 40, 0]
    momentum = Schedule.of(SFTConfig(selection="momentum", replacement_rate=0.5), TOTAL)
    assert [momentum.num_replaced(t, 1000) for t in (20, 40, 60)] == [1000, 300, 200]


def test_nothing_is_reselected_without_an_interval_or_after_the_end() -> None:
    never = Schedule.of(SFTConfig(reselection_interval=None), TOTAL)
    assert never.next_reselection(0) is None and not never.open_phases(4)
    schedule = Schedule.of(SFTConfig(), TOTAL)
    assert schedule.next_reselection(100) is None
    assert not any(schedule.open_phases(t) for t in range(100, 200))


@pytest.mark.parametrize("total", [0, -1, 1.5, True, None])
def test_the_number_of_updates_must_be_known(total: object) -> None:
    with pytest.raises(ValueError, match=r"total_steps=.* must be a positive integer"):
        Schedule.of(SFTConfig(), total)  # type: ignore[arg-type]
