from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from slivertune.planning.cards import EFFICIENCY, card_named
from slivertune.planning.request import PlanRequest
from slivertune.training.output import rates_here as module
from slivertune.training.output.rates_here import measured_rates, rates_here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_is_measured_and_no_random_number_is_drawn(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    here = measured_rates(dtype)
    assert torch.equal(torch.get_rng_state(), before)
    # No core does fewer products, and none more than a large GPU.
    assert 1e7 < here.rates.flops < 1e15 and 1e8 < here.rates.bus_bandwidth < 1e13
    assert here.rates.memory_bandwidth == 2 * here.rates.bus_bandwidth
    assert here.source.endswith("GFLOP/s, measured here") and here.memory_bytes is None


def test_a_run_in_bf16_is_planned_by_products_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(return_value=SimpleNamespace())
    monkeypatch.setattr(module, "measured_rates", measure)
    for precision in ("fp32", "mixed"):
        rates_here(torch.device("cpu"), PlanRequest(method="dense", precision=precision))
    assert [call.args for call in measure.call_args_list] == [(torch.float32,), (torch.bfloat16,)]


def test_a_gpu_has_the_figures_of_its_card_and_says_what_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = card_named("4090")
    monkeypatch.setattr(module, "card_here", lambda: card)
    here = rates_here(torch.device("cuda"), PlanRequest(precision="bf16"))
    assert here.rates == card.rates(efficiency=EFFICIENCY) and here.memory_bytes == card.memory_bytes
    assert here.source == f"{here.rates.flops / 1e12:.3g} TFLOP/s, assumed as 60% of the peak of a {card.name}"


def test_rates_that_are_not_known_are_an_error_with_the_devices_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "card_here", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card X")
    with pytest.raises(ValueError, match="the rates of Card X are not known"):
        rates_here(torch.device("cuda"), PlanRequest())
    with pytest.raises(ValueError, match="the rates of a device 'mps' are not known"):
        rates_here(torch.device("mps"), PlanRequest())
