"""The device's time: of small programs as worked out by hand, and of HiFT beside the plan's formula."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks import quick
from tests.pretended_cuda import timed_runs
from tests.pretended_cuda.on_device import on_device

NUM = 1000
"""Elements of fp32: 4,000 bytes take 4 s of memory and 40 s of the bus each way."""
CARD = {"flops": 100.0, "memory_bandwidth": 1000.0, "bus_bandwidth": 100.0, "launch_seconds": 0.0}


def an_operator(torch: Any, ones: Any, host: Any, side: Any) -> None:
    ones.mul(2)  # reads and writes


def one_in_place(torch: Any, ones: Any, host: Any, side: Any) -> None:
    ones.mul_(2)


def a_product(torch: Any, ones: Any, host: Any, side: Any) -> None:
    ones.view(10, 100) @ ones.view(100, 10)  # 20,000 operations


def rows_of_a_table(torch: Any, ones: Any, host: Any, side: Any) -> None:
    ones.view(100, 10)[torch.arange(0, 10, device="cuda")]  # indices: 80 bytes, written and read; 400 and 400 of rows


def a_copy_beside_an_operator(torch: Any, ones: Any, host: Any, side: Any) -> None:
    with torch.cuda.stream(side):
        torch.empty_like(ones).copy_(host, non_blocking=True)
    ones.mul(2)


def an_operator_after_a_copy(torch: Any, ones: Any, host: Any, side: Any) -> None:
    a_copy_beside_an_operator(torch, ones, host, side)
    torch.cuda.current_stream().wait_stream(side)
    ones.mul(2)


def two_copies_of_one_direction(torch: Any, ones: Any, host: Any, side: Any) -> None:
    with torch.cuda.stream(side):
        torch.empty_like(ones).copy_(host, non_blocking=True)
    torch.empty_like(ones).copy_(host, non_blocking=True)


def copies_of_both_directions(torch: Any, ones: Any, host: Any, side: Any) -> None:
    with torch.cuda.stream(side):
        torch.empty_like(ones).copy_(host, non_blocking=True)
    torch.empty_like(host, pin_memory=True).copy_(ones, non_blocking=True)


def a_copy_in_the_gap_before_another(torch: Any, ones: Any, host: Any, side: Any) -> None:
    """The first waits for 80 s of operators; the second passes it by, and the third has no room there."""
    for _ in range(10):
        ones.mul(2)
    torch.empty_like(ones).copy_(host, non_blocking=True)
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.empty_like(ones).copy_(host, non_blocking=True)


def a_copy_that_waits(torch: Any, ones: Any, host: Any, side: Any) -> None:
    torch.empty_like(ones).copy_(host)
    with torch.cuda.stream(side):
        ones.mul(2)


PROGRAMS: dict[str, tuple[Callable[..., None], dict[str, Any], float]] = {
    "bytes": (an_operator, {}, 8),
    "bytes in place": (one_in_place, {}, 8),
    "operations": (a_product, {}, 200),
    "rows": (rows_of_a_table, {}, 0.96),
    "beside": (a_copy_beside_an_operator, {}, 40),
    "after": (an_operator_after_a_copy, {}, 48),
    "one direction": (two_copies_of_one_direction, {}, 80),
    "both directions": (copies_of_both_directions, {}, 40),
    "gap": (a_copy_in_the_gap_before_another, {}, 160),
    "host waits": (a_copy_that_waits, {}, 48),
    "launches": (an_operator, {"launch_seconds": 5.0}, 13),
    # What is read is in memory, what is written fits the cache's quarter.
    "cache": (an_operator, {"cache_bytes": 32_768, "cache_bandwidth": 4000.0}, 4 + 1),
    "what is read displaces it": (an_operator, {"cache_bytes": 16_384, "cache_bandwidth": 4000.0}, 8),
    "no room in the cache": (an_operator, {"cache_bytes": 15_999, "cache_bandwidth": 4000.0}, 8),
}
"""Program, changes of the card, and the seconds until all streams are done."""


def seconds_of(name: str) -> float:
    import torch

    from tests.pretended_cuda.virtual_time import Card, VirtualTime

    program, changes, _ = PROGRAMS[name]
    ones, host = torch.ones(NUM, device="cuda"), torch.ones(NUM, pin_memory=True)
    side = torch.cuda.Stream()
    with VirtualTime(Card(**{**CARD, **changes})) as time:
        program(torch, ones, host, side)
        return max(time.of_stream(), time.of_stream(side.stream_id))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_takes_the_seconds_that_are_worked_out_by_hand(name: str) -> None:
    assert on_device(seconds_of, name) == pytest.approx(PROGRAMS[name][2])


ALL_LAYERS = 34
POINTS: list[tuple[int, int, float, dict[str, Any]]] = [
    *((tokens, groups, 4.0, {}) for tokens, groups in itertools.product((64, 256), (1, 4, ALL_LAYERS))),
    (64, 1, 0.0, {}),
    (256, 4, 0.0, {}),
    (256, ALL_LAYERS, 0.0, {}),
    *((256, groups, 4.0, {"gradients": "host"}) for groups in (1, 4, ALL_LAYERS)),
]
"""Tokens of an update and layers of a group, of the 8B; GiB of prefetching; other settings."""


def compared(num_blocks: int, tokens: int, layers: int, gib_ahead: float, others: dict[str, Any]) -> tuple[float, ...]:
    """Seconds of an update, those exposed, and those exposed by the formula."""
    length, settings = timed_runs.scaled(tokens, gib_ahead, layers_per_group=layers, **others)
    seconds, exposed = on_device(timed_runs.timed, num_blocks, length, settings)
    return seconds, exposed, timed_runs.planned(num_blocks, length, settings)


# The formula takes an update's groups and the bus as a whole: a tenth of what is exposed, or a hundredth of the update.
@pytest.mark.parametrize(
    ("num_blocks", "point"),
    quick([*((32, point) for point in POINTS), (6, POINTS[1]), (6, POINTS[-2])], [(6, POINTS[-2])]),
)
def test_exposed_seconds_are_those_of_the_formula(num_blocks: int, point: tuple[Any, ...]) -> None:
    seconds, exposed, by_formula = compared(num_blocks, *point)
    print(f"{num_blocks} {point}: {exposed / seconds:.1%} exposed, {by_formula / exposed - 1:+.1%} by the formula")
    assert abs(exposed - by_formula) <= max(0.1 * exposed, 0.01 * seconds)


@pytest.mark.slow
def test_one_layer_at_512_tokens_hides_its_copies() -> None:
    seconds, exposed, _ = compared(32, 512, 1, 4.0, {})
    assert exposed <= 0.05 * seconds
