"""How many bytes pass between host and device, and when: each once a cycle or a turn, neither twice nor too late."""

import itertools
from collections import Counter
from typing import Any

import pytest

from slivertune.hift.prefetch import Prefetcher
from tests.helpers.hift_parts import part_of
from tests.helpers.models import LAYERS
from tests.helpers.ranks import quick
from tests.pretended_cuda.on_device import on_device

MASTER_AND_MOMENTS = 3 * 4
GRADIENT = 2
ALL = 10**9
"""Room for all chunks."""
TURN = 3


def bytes_by_update(num_more: int, *, skipped: int = 0, blocks: int = 1, **config: Any) -> dict[str, Any]:
    """What is copied on side streams, in each of some updates.

    Args:
        num_more: Updates that are counted.
        skipped: Cycles before them, in which state is made and comes for the first time.
        blocks: Of the model.
        config: HiFT's settings.

    Returns:
        Bytes by direction of each update, and of its forward and backward alone; how many weights and groups there are.
    """
    import torch

    from tests.helpers.models import small_decoder, token_batches
    from tests.hift.cases import BIG_VOCAB, hift_over
    from tests.pretended_cuda.detector import Detector

    model: Any = small_decoder(torch.bfloat16, vocab=BIG_VOCAB, blocks=blocks)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model, hift = hift_over(model if config.get("weights") == "host" else model.to("cuda"), "AdamW", **config)
    batch = {name: value.to("cuda") for name, value in token_batches(1, vocab=BIG_VOCAB)[0].items()}
    updates, backwards = [], []
    with Detector() as found:
        for update in range(skipped * hift.cycle_length + num_more):
            before = Counter(found.side_copies())
            model(**batch).loss.backward()
            between = Counter(found.side_copies())
            hift.step()
            hift.zero_grad()
            if update >= skipped * hift.cycle_length:
                backwards.append(dict(between - before))
                updates.append(dict(Counter(found.side_copies()) - before))
    assert not found.races
    return {
        "updates": updates,
        "backwards": backwards,
        "parameters": num_parameters,
        "groups": hift.num_groups,
    }


def bytes_of_a_cycle(**config: Any) -> tuple[float, float]:
    """Per parameter that trains, in and out, once every group has had its turn."""
    # A forward that no one has measured beside state that is held lets it give way, once.
    found = on_device(one_cycle, {"stream_bytes": 20_000, **config})
    total = {way: sum(each.get(way, 0) for each in found["updates"]) for way in ("inbound", "outbound")}
    return total["inbound"] / found["parameters"], total["outbound"] / found["parameters"]


def one_cycle(config: dict[str, Any]) -> dict[str, Any]:
    """Each group's turn in a model of one block, after two cycles."""
    num_groups = -(-3 // config.get("layers_per_group", 1))  # embedding, block, head
    return bytes_by_update(num_groups * config.get("steps_per_group", 1), skipped=2, **config)


def after_a_cycle(config: dict[str, Any], num_more: int, skipped: int) -> dict[str, Any]:
    """So many updates of a model of three blocks, after some cycles."""
    return bytes_by_update(num_more, skipped=skipped, blocks=3, **config)


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "usual": ({}, 0),
    "two layers": ({"layers_per_group": 2}, 0),
    "in the backward": ({"gradients": "stepped"}, 0),
    "gradients on the host": ({"gradients": "host"}, GRADIENT),
}


@pytest.mark.parametrize(
    ("name", "prefetch_bytes"),
    quick(
        itertools.product(CONFIGS, [0, 50_000, ALL]),
        [("usual", 0), ("usual", ALL), ("two layers", 50_000), ("in the backward", 50_000),
         ("gradients on the host", ALL)],
    ),
)  # fmt: skip
def test_masters_and_moments_come_and_leave_once_a_cycle(name: str, prefetch_bytes: int) -> None:
    config, gradients = CONFIGS[name]
    each_way = MASTER_AND_MOMENTS + gradients
    assert bytes_of_a_cycle(prefetch_bytes=prefetch_bytes, **config) == (each_way, each_way)


@pytest.mark.parametrize("gradients", ["device", "stepped"])
def test_what_stays_comes_and_leaves_once_a_turn_and_what_does_not_in_each_update(gradients: Any) -> None:
    turns: dict[str, Any] = {"steps_per_group": 2, "layers_per_group": 2, "gradients": gradients}
    usual = bytes_of_a_cycle(prefetch_bytes=0, **turns)
    stays = bytes_of_a_cycle(prefetch_bytes=ALL, **turns)
    assert usual == (2 * MASTER_AND_MOMENTS,) * 2 and stays == (MASTER_AND_MOMENTS,) * 2


def test_state_that_has_room_has_come_before_the_step_where_weights_come_too() -> None:
    found = on_device(after_a_cycle, {"weights": "host", "resident_bytes": 0, "prefetch_bytes": ALL}, LAYERS, 1)
    for update, backward in zip(found["updates"], found["backwards"], strict=True):
        assert update["inbound"] == backward["inbound"] > 0 and update["outbound"] > 0


@pytest.mark.parametrize("gradients", quick(["device", "stepped"], ["stepped"]))
def test_where_all_fits_nothing_is_copied_in_the_middle_of_a_turn(gradients: Any) -> None:
    config = {"prefetch_bytes": ALL, "gradients": gradients, "layers_per_group": 2, "steps_per_group": TURN}
    found = on_device(after_a_cycle, {**config, "stream_bytes": 20_000}, 3 * TURN, 1)
    # The state came when the turn began, after the last update of the one before; that of the next comes after the
    # last update of this, from which this one's leaves.
    for way in ("inbound", "outbound"):
        assert [each.get(way, 0) > 0 for each in found["updates"]] == ([False] * (TURN - 1) + [True]) * found["groups"]


@pytest.mark.parametrize(
    ("updates", "gradients"),
    quick(itertools.product([1, 2, TURN], ["device", "stepped"]), [(1, "device"), (2, "stepped"), (TURN, "device")]),
)
def test_state_that_is_thrown_away_is_not_copied(updates: int, gradients: Any) -> None:
    config = {"steps_per_group": updates, "state": "discard", "gradients": gradients}
    found = on_device(after_a_cycle, config, LAYERS * updates, 0)
    leaving = [each.get("outbound", 0) > 0 for each in found["updates"]]
    assert leaving == ([True] * (updates - 1) + [False]) * found["groups"]


def room_ahead(resets: bool) -> int:
    """Bytes of prefetching that `auto` chooses while a script frees memory and resets the statistics, or does not."""
    import torch

    from tests.helpers.models import small_decoder
    from tests.hift.cases import hift_over
    from tests.pretended_cuda.programs import batches

    model, hift = hift_over(small_decoder(torch.bfloat16).to("cuda"), "AdamW", prefetch_bytes="auto")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for batch in batches("cuda", 2 * LAYERS):
        model(**batch).loss.backward()
        hift.step()
        hift.zero_grad()
        if resets:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    (slots,) = part_of(hift, Prefetcher).slots.values()
    return int(slots.prefetch_bytes)


def test_auto_knows_the_peak_whoever_resets_the_statistics() -> None:
    assert on_device(room_ahead, True) == on_device(room_ahead, False) > 0
