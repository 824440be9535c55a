"""How many bytes pass between host and device in a cycle: each once, neither twice nor too late."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.models import tiny_llama, token_batches
from tests.helpers.ranks import quick
from tests.helpers.reference import train
from tests.hift.cases import BIG_VOCAB, hift_over
from tests.hift.test_ordering import pretended

BATCHES = token_batches(7, vocab=BIG_VOCAB)
MASTER_AND_MOMENTS = 3 * 4
GRADIENT = 2


def bytes_of_a_cycle(**config: Any) -> tuple[float, float]:
    """Per parameter that trains, in and out, once every group has had its turn."""
    model = tiny_llama(torch.bfloat16, vocab=BIG_VOCAB, blocks=1)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with pretended() as streams:
        model, hift = hift_over(model, "AdamW", stream_bytes=20_000, **config)
        # A forward that no one has measured beside state that is held lets it give way, once.
        train(model, hift, BATCHES, 2 * hift.cycle_length)
        before = Counter(streams.copied_bytes)
        train(model, hift, BATCHES, hift.cycle_length)
        copied = streams.copied_bytes - before
    return copied["inbound"] / num_parameters, copied["outbound"] / num_parameters


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "usual": ({}, 0),
    "two layers": ({"layers_per_group": 2}, 0),
    "in the backward": ({"gradients": "stepped"}, 0),
    "gradients on the host": ({"gradients": "host"}, GRADIENT),
}


@pytest.mark.parametrize(
    ("name", "prefetch_bytes"),
    quick(
        itertools.product(CONFIGS, [0, 50_000, 10**9]),
        [("usual", 0), ("usual", 10**9), ("two layers", 50_000), ("in the backward", 50_000),
         ("gradients on the host", 10**9)],
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
    stays = bytes_of_a_cycle(prefetch_bytes=10**9, **turns)
    assert usual == (2 * MASTER_AND_MOMENTS,) * 2 and stays == (MASTER_AND_MOMENTS,) * 2


def test_state_that_has_room_has_come_before_the_step_where_weights_come_too() -> None:
    with pretended() as streams:
        model, hift = hift_over(
            tiny_llama(torch.bfloat16, vocab=BIG_VOCAB), "AdamW", weights="host", resident_bytes=0, prefetch_bytes=10**9
        )
        train(model, hift, BATCHES, hift.cycle_length)
        for batch in BATCHES[: hift.cycle_length]:
            model(**batch).loss.backward()
            before = streams.copied_bytes["inbound"]
            hift.step()
            hift.zero_grad()
            assert streams.copied_bytes["inbound"] == before
    assert streams.violations == []
