"""Each method on a pretended CUDA device: the bits of what stays there, no race, no copy of unpinned memory."""

from contextlib import nullcontext
from typing import Any

import pytest

from tests.helpers.ranks import quick
from tests.pretended_cuda.on_device import on_device
from tests.pretended_cuda.programs import PROGRAMS


def found_of(name: str, device: str, is_planted: bool = False) -> dict[str, Any]:
    """Run a program under the detector, and what must have its bits."""
    import torch

    from tests.pretended_cuda.detector import Detector
    from tests.pretended_cuda.races import planted

    program, other = PROGRAMS[name]
    torch.manual_seed(0)
    expected = [] if is_planted else other(device)
    torch.manual_seed(0)
    with planted() if is_planted else nullcontext(), Detector() as found:
        got = program(device)
    return {
        "num_different": sum(not torch.equal(one, other) for one, other in zip(got, expected, strict=not is_planted)),
        "races": dict(found.races),
        "unpinned": dict(found.unpinned),
        "on autograd's threads": found.num_on_autograd_threads,
        "copied on side streams": found.side_copies(),
        "registered": found.registered_bytes,
    }


ON_THE_SECOND_DEVICE = ("HiFT, resumed", "HiFT on a stream of the user", "SFT by accumulated gradients", "TokenTune")
"""Programs that run there, too, while the first is the current one."""
CASES = [*((name, "cuda") for name in PROGRAMS), *((name, "cuda:1") for name in ON_THE_SECOND_DEVICE)]
VARIANTS = (
    ("SFT, packed", "cuda"),
    ("SFT, redistributed", "cuda"),
    ("SFT by momentum", "cuda"),
    ("TokenTune, GPT-2", "cuda"),
    ("TokenTune, checkpointed", "cuda"),
    ("TokenTune by chunks", "cuda"),
    ("TokenTune by blocks", "cuda"),
    ("the Trainer, gradients on the host", "cuda"),
    ("HiFT on a stream of the user", "cuda"),
    ("HiFT with activations that wait on the host, re-entered", "cuda"),
    ("HiFT, steps skipped, some chunks stay", "cuda"),
    ("HiFT, resumed", "cuda:1"),
    ("LoRA over blocks on the host, not checkpointed", "cuda"),
    ("SFT over blocks on the host", "cuda"),
    ("SFT over codes on the host", "cuda"),
    ("HiFT, steps skipped", "cuda"),
    ("HiFT that keeps as many activations as fit", "cuda"),
    ("SFT by accumulated gradients", "cuda:1"),
)
"""Cases that `make test-all` alone runs."""


@pytest.mark.parametrize(
    ("name", "device"),
    quick(CASES, [case for case in CASES if case not in VARIANTS]),
)
def test_bits_are_those_of_what_stays_and_nothing_races(name: str, device: str) -> None:
    found = on_device(found_of, name, device, num_devices=1 if device == "cuda" else 2)
    assert found["races"] == {} and found["unpinned"] == {}
    assert found["num_different"] == 0
    assert found["on autograd's threads"] > 100
    moved = found["copied on side streams"]
    if name.startswith(("HiFT", "the Trainer", "TokenTune over HiFT")):
        assert found["registered"] > 0 < min(moved.values())
    elif "on the host" in name:
        assert found["registered"] > 0 < moved["inbound"] and not moved["outbound"]
    else:
        assert moved == {"inbound": 0, "outbound": 0} and not found["registered"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_race_that_is_planted_in_a_program_is_reported(name: str) -> None:
    assert on_device(found_of, name, "cuda", True)["races"]
