"""The detector on small programs: a true race is reported, and the same program in the right order is not."""

import pytest

from tests.pretended_cuda.on_device import on_device
from tests.pretended_cuda.races import PROGRAMS


def races_of(name: str, ordered: bool) -> list[str]:
    from tests.pretended_cuda.detector import Detector

    with Detector() as found:
        PROGRAMS[name][0](ordered)
    return list(found.races)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_race_is_reported_and_the_right_order_is_not(name: str) -> None:
    wrong = on_device(races_of, name, False, num_devices=2)
    assert any(PROGRAMS[name][1] in race for race in wrong), wrong
    assert on_device(races_of, name, True, num_devices=2) == []
