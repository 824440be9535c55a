"""A place of state is one file and one line in a table: here another device's memory, in a folder of its own."""

from typing import Any

import pytest
import torch

from slivertune import HiFT, HiFTConfig
from slivertune.hift import state_places
from tests.helpers.models import assert_same_bits, tiny_llama, token_batches, twin
from tests.helpers.reference import train
from tests.pretended_cuda.on_device import on_device
from tests.second_device import place


def hift_over(model: Any) -> HiFT:
    config = HiFTConfig.paper(stream_bytes=20_000)
    return HiFT(model, torch.optim.AdamW, config=config, lr=1e-2)


def test_it_takes_a_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(torch.bfloat16, blocks=3)
    other = twin(model)
    plain = hift_over(other)
    monkeypatch.setitem(state_places.STATE_PLACES, "host", place.on_second_device)
    own = hift_over(model)
    batches = token_batches(8)
    assert train(model, own, batches, 12) == train(other, plain, batches, 12)
    assert_same_bits(model, other)
    saved = own.state_dict()
    resumed = twin(model)
    again = hift_over(resumed)
    again.load_state_dict(saved)
    assert train(resumed, again, batches, 6, start=12) == train(other, plain, batches, 6, start=12)


def on_two_devices() -> dict[str, Any]:
    from tests.pretended_cuda.detector import Detector

    batches = [{name: value.to("cuda:0") for name, value in batch.items()} for batch in token_batches(8)]
    model = tiny_llama(torch.bfloat16, blocks=3)
    other = twin(model).to("cuda:0")
    model = model.to("cuda:0")
    plain = hift_over(other)
    expected = train(other, plain, batches, 12)
    before = state_places.STATE_PLACES["host"]
    state_places.STATE_PLACES["host"], place.DEVICE["state"] = place.on_second_device, torch.device("cuda:1")
    try:
        with Detector() as found:
            own = hift_over(model)
            losses = train(model, own, batches, 12)
            places = {
                str(value.device)
                for state in own.state_dict()["state"].values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.dim()
            }
            own.detach()
    finally:
        state_places.STATE_PLACES["host"] = before
    assert_same_bits(model, other)
    return {"losses": losses == expected, "places": places, "races": dict(found.races)}


def test_state_is_on_the_second_of_two_devices() -> None:
    assert on_device(on_two_devices, num_devices=2) == {"losses": True, "places": {"cuda:1"}, "races": {}}
