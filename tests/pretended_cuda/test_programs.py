"""Each method on a pretended CUDA device: the bits of what stays there, no race, no copy of unpinned memory."""

from typing import Any

import pytest

from tests.pretended_cuda.on_device import on_device
from tests.pretended_cuda.programs import PROGRAMS


def found_of(name: str, device: str) -> dict[str, Any]:
    """Run a program under the detector, and what must have its bits."""
    import torch

    from tests.pretended_cuda.detector import Detector

    program, other = PROGRAMS[name]
    torch.manual_seed(0)
    expected = other(device)
    torch.manual_seed(0)
    with Detector() as found:
        got = program(device)
    return {
        "num_different": sum(not torch.equal(one, other) for one, other in zip(got, expected, strict=True)),
        "races": dict(found.races),
        "unpinned": dict(found.unpinned),
        "on autograd's threads": found.num_on_autograd_threads,
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_those_of_what_stays_and_nothing_races(name: str) -> None:
    found = on_device(found_of, name, "cuda")
    assert found["races"] == {} and found["unpinned"] == {}
    assert found["num_different"] == 0
    assert found["on autograd's threads"] > 100
