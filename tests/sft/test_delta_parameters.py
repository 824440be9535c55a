"""The deltas are the model's parameters while SFT is attached, and no part of what the model saves."""

from functools import partial

import torch
from torch import nn

from slivertune import SFT, SFTConfig
from tests.helpers.models import differing, small_decoder, token_batches
from tests.sft.runs import sft_over, train

attached = partial(sft_over, estimation_steps=2)


def test_the_models_state_dict_is_that_of_the_model_alone() -> None:
    model = small_decoder()
    names = list(model.state_dict())
    optimizer = attached(model)
    assert list(model.state_dict()) == names
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, token_batches(3))
    assert differing(dict(model.state_dict()), saved)
    assert model.load_state_dict(saved).missing_keys == []


def test_the_deltas_stay_fp32_when_the_model_is_cast() -> None:
    model = small_decoder(torch.bfloat16)
    optimizer = attached(model)
    model.to(torch.bfloat16)
    assert {phi.dtype for phi in optimizer.param_groups[0]["params"]} == {torch.float32}
    train(model, optimizer, [token_batches(1)[0]])
    assert {phi.dtype for phi in optimizer.param_groups[0]["params"]} == {torch.float32}


def test_a_model_that_is_a_container_keeps_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SFT(model, config=SFTConfig(density=0.5, targets=[nn.Linear]), lr=1e-2, total_steps=20)
    assert len(model) == 2
    model(torch.randn(3, 4)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    optimizer.step()
    assert optimizer.updates == 1
