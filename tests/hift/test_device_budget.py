"""One budget of the device's bytes: how it is shared out, that it is kept, and that no bit depends on it."""

from typing import Any

import pytest
import torch

from slivertune import HiFT, HiFTConfig
from slivertune.core.ledger import Ledger
from slivertune.hift.device_budget import share_out
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import assert_same_bits, tiny_llama, token_batches, twin
from tests.helpers.pairwise import rotated
from tests.helpers.reference import train

BATCHES = token_batches(8)
MB = 10**6
STATE = 2 * MB
HOST: dict[str, Any] = {"weights": "host"}


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, ("auto", "auto")),
        ({"prefetch_bytes": 5, **HOST}, (5, "auto")),
        ({"device_bytes": MB}, (MB, "auto")),
        ({"device_bytes": 8 * MB}, (STATE, "auto")),
        # State first, blocks get the rest; two chunks of an eighth pass in any case.
        ({"device_bytes": MB, **HOST}, (MB, 0)),
        ({"device_bytes": 8 * MB, **HOST}, (STATE, 6 * MB)),
        ({"device_bytes": 8 * MB, "prefetch_bytes": 50, **HOST}, (50, 6 * MB)),
        ({"device_bytes": 8 * MB, "prefetch_bytes": 3 * MB, **HOST}, (3 * MB, 5 * MB)),
        ({"device_bytes": 8 * MB, "resident_bytes": 7 * MB, **HOST}, (MB, 7 * MB)),
        ({"device_bytes": 8 * MB, "resident_bytes": 0, **HOST}, (STATE, 0)),
        ({"device_bytes": 8 * MB, "stream_bytes": MB // 2, "prefetch_bytes": 0, **HOST}, (0, 7 * MB)),
    ],
    ids=str,
)
def test_state_comes_first_and_blocks_get_the_rest(settings: Any, shares: Any) -> None:
    assert share_out(HiFTConfig.paper(**settings), lambda: STATE) == shares


@pytest.mark.parametrize(
    ("settings", "chunk"),
    [
        ({}, 128 * 2**20),
        ({"device_bytes": 2**20}, 2**17),
        ({"device_bytes": "2GiB"}, 128 * 2**20),
        ({"device_bytes": 2**20, "stream_bytes": 2**25}, 2**17),
        ({"device_bytes": 2**20, "stream_bytes": 2**10}, 2**10),
        ({"device_bytes": 2**20, "stream_bytes": 0}, 2**17),
        ({"device_bytes": 2**20, "gradients": "stepped"}, 2**16),
    ],
    ids=str,
)
def test_two_chunks_pass_within_it(settings: Any, chunk: int) -> None:
    assert HiFTConfig.paper(**settings).chunk_bytes == chunk


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_bytes": MB, "state": "device"}, 'state="device" with weights="device" offloads none. Leave it out'),
        (
            {"device_bytes": MB, "prefetch_bytes": 2 * MB},
            "^prefetch_bytes=2000000 do not fit into device_bytes",
        ),
        (
            {"device_bytes": MB, "prefetch_bytes": 600_000, "resident_bytes": 600_000, **HOST},
            "prefetch_bytes=600000 and resident_bytes=600000 do not fit.*Lower them, or raise device_bytes",
        ),
        ({"device_bytes": 1}, "must be at least 16384.*To hold nothing ahead, set prefetch_bytes=0"),
        ({"device_bytes": -1}, "device_bytes=-1"),
        ({"device_bytes": "some"}, "device_bytes='some'"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace('"', "['\"]")):
        HiFTConfig(**settings)


def test_state_stays_through_a_turn_if_the_budget_has_room_for_all_of_it() -> None:
    model = tiny_llama(torch.bfloat16, blocks=4)
    with delayed(None):
        settings: dict[str, Any] = {"steps_per_group": 4, "device_bytes": 400_000, "stream_bytes": 30_000}
        own = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(weights="host", **settings), lr=1e-2)
        train(model, own, BATCHES, own.cycle_length + 2)
        state: Any = own.turns.states[own.active_group]
        assert len(state.chunks) > 2 and {chunk.where for chunk in state.chunks} == {"device"}


def test_state_is_measured_whatever_the_base_optimizer_is() -> None:
    class Unknown(torch.optim.AdamW):
        pass

    model = tiny_llama(blocks=4)
    config = HiFTConfig.paper(weights="host", device_bytes=MB)
    hift = HiFT(model, Unknown, config=config, lr=1e-2)
    groups = [hift.weights_of(group) for group in range(hift.num_groups)]
    largest = max(sum(weight.parameter.numel() for weight in each) for each in groups)
    streamed: Any = hift.turns.parked.streamed
    blocks = streamed.blocks.weights
    resident = sum(size for index, size in enumerate(blocks.block_bytes) if index not in blocks.streamed)
    assert resident <= MB - 8 * largest


@rotated(
    device_bytes=[30_000, 60_000, 300_000], weights=["device", "host"], steps_per_group=[1, 3], layers_per_group=[1, 2]
)
def test_the_device_never_holds_more_and_the_bits_are_the_same(
    device_bytes: int, weights: str, steps_per_group: int, layers_per_group: int
) -> None:
    model = tiny_llama(torch.bfloat16, blocks=4)
    others: dict[str, Any] = {"steps_per_group": steps_per_group, "layers_per_group": layers_per_group}
    plain = twin(model)
    resident = HiFT(plain, torch.optim.AdamW, config=HiFTConfig.paper(**others), lr=1e-2)
    with delayed(None):
        config = HiFTConfig.paper(device_bytes=device_bytes, weights=weights, **others)
        own = HiFT(model, torch.optim.AdamW, config=config, lr=1e-2)
        with Ledger(model) as ledger:
            # A group's masters are made in its first turn, and leave chunk by chunk.
            steps = own.cycle_length + 1
            train(model, own, BATCHES, steps)
            ledger.reset_peak()
            train(model, own, BATCHES, steps, start=steps)
            held = ledger.highest.state
        train(plain, resident, BATCHES, 2 * steps)
        assert_same_bits(model, plain)
    if weights == "host":
        streamed: Any = own.turns.parked.streamed
        blocks = streamed.blocks.weights
        held += sum(size for index, size in enumerate(blocks.block_bytes) if index not in blocks.streamed)
        if device_bytes == 300_000:
            assert len(blocks.streamed) < len(blocks.block_bytes), "some have room"
    # Beside the slots a chunk has its temporaries while it is stepped: a cast of its gradients, and AdamW's.
    assert 0 < held <= device_bytes + config.chunk_bytes
