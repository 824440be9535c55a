"""Changes by a plain loop between a backward and the step, or of the optimizer: HiFT trains by them, or raises."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig
from tests.helpers.accelerator import one_device
from tests.helpers.models import LAYERS, assert_same_bits, differing, small_decoder, token_batches, weights
from tests.hift.cases import hift_over


def set_by_hand(model: Any, batch: Any, how: str) -> None:
    """Gradients of autograd.grad: put in place of those that are there, or added to them."""
    active = [each for each in model.parameters() if each.requires_grad]
    for parameter, gradient in zip(active, torch.autograd.grad(model(**batch).loss, active), strict=True):
        if how == "added" and parameter.grad is not None:
            parameter.grad.add_(gradient)
        else:
            parameter.grad = gradient


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("how", ["replaced", "added"])
def test_gradients_that_are_set_by_hand_are_those_of_a_backward(how: str, gradients: Any) -> None:
    made = []
    for by_hand in (False, True):
        model, hift = hift_over(small_decoder(), torch.optim.AdamW, gradients=gradients, lr=1e-2)
        for batch in token_batches(2 * LAYERS):
            if by_hand:
                set_by_hand(model, batch, how)
            else:
                model(**batch).loss.backward()
            hift.step()
            hift.zero_grad()
        assert hift.updates == 2 * LAYERS and hift.skipped_turns == {}
        made.append(model)
    assert_same_bits(*made)


def test_another_list_of_param_groups_is_refused() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    before = weights(model)
    hift.param_groups = [{**group, "lr": 0.0} for group in hift.param_groups]
    model(**token_batches(1)[0]).loss.backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.param_groups was replaced by another list"):
        hift.step()
    assert differing(weights(model), before) == []


def test_an_optimizer_that_an_accelerator_has_prepared_is_not_wrapped() -> None:
    model = small_decoder()
    with one_device() as accelerator:
        prepared = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        with pytest.raises(ValueError, match=r"accelerator\.prepare has wrapped this optimizer"):
            HiFT.wrap(prepared, model, config=HiFTConfig.paper())


@pytest.mark.parametrize(
    "register",
    [
        "register_step_pre_hook",
        "register_step_post_hook",
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_hooks_of_an_optimizer_to_wrap_are_refused(register: str) -> None:
    model: nn.Module = small_decoder()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    getattr(base, register)(lambda *_: None)
    with pytest.raises(ValueError, match=r"the AdamW to wrap has hooks \(_optimizer_"):
        HiFT.wrap(base, model)


def test_a_state_of_other_param_groups_is_refused_by_its_groups() -> None:
    model = small_decoder()
    _, hift = hift_over(copy.deepcopy(model), torch.optim.AdamW, lr=1e-2)
    hift.step()
    decayed = [{"params": [each]} for each in model.parameters()]
    other = HiFT.wrap(torch.optim.AdamW(decayed, lr=1e-2), model, config=HiFTConfig.paper())
    with pytest.raises(ValueError, match="the param_groups of the saved state"):
        other.load_state_dict(hift.state_dict())
