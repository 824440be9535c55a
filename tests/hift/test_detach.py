"""Who holds a model: one HiFT at a time, until it is detached or dropped; then the model is as it was before."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slivertune import SFT, HiFT, SFTConfig
from tests.helpers.models import (
    LAYERS,
    assert_same_bits,
    differing,
    tiny_llama,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.reference import train
from tests.hift.cases import hift_over


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_detach_gives_back_what_was_free_and_takes_every_hook_away(step_in_backward: bool) -> None:
    model = tiny_llama()
    model.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad_(False)
    free = trainable(model)
    _, hift = hift_over(model, torch.optim.AdamW, step_in_backward=step_in_backward, lr=1e-2)
    assert hooks_of(model)
    train(model, hift, token_batches(2), 2)
    hift.detach()
    assert trainable(model) == free and hooks_of(model) == 0
    model.requires_grad_(False)
    hift.detach()
    assert trainable(model) == set(), "the second call has nothing to give back"
    with pytest.raises(RuntimeError, match=r"after detach\(\).*reattach"):
        hift.step()


@pytest.mark.parametrize("what", ["the model", "a part of it", "a wrapper of it"])
def test_a_second_hift_over_a_held_model_is_refused(what: str) -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, lr=1e-2)
    free = trainable(model)
    target = {"the model": model, "a part of it": model.model, "a wrapper of it": nn.Sequential(model)}[what]
    with pytest.raises(ValueError, match=r"trained by another HiFT.*detach\(\)"):
        HiFT(target, torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match=r"detach\(\)"):
        HiFT.wrap(torch.optim.AdamW(target.parameters(), lr=1e-2), target)
    assert trainable(model) == free
    hift.detach()
    again = HiFT(model, torch.optim.AdamW, lr=1e-2)
    assert trainable(model) == set(again.groups[0].parameter_names)


def test_hift_and_sft_do_not_share_a_model() -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match=r"trained by another HiFT.*SFT can't train it.*detach\(\)"):
        SFT(model, config=SFTConfig(density=0.1), lr=1e-2, total_steps=10)
    hift.detach()
    sft = SFT(model, config=SFTConfig(density=0.1), lr=1e-2, total_steps=10)
    with pytest.raises(ValueError, match=r"trained by another SFT.*HiFT can't train it.*detach\(\)"):
        HiFT(model, torch.optim.AdamW, lr=1e-2)
    sft.detach()
    assert HiFT(model, torch.optim.AdamW, lr=1e-2).num_groups == LAYERS


@pytest.mark.parametrize("with_schedule", [False, True])
@pytest.mark.parametrize("step_in_backward", [False, True])
def test_an_optimizer_that_was_dropped_holds_nothing(step_in_backward: bool, with_schedule: bool) -> None:
    model = tiny_llama()
    everything = trainable(model)
    _, hift = hift_over(model, torch.optim.AdamW, step_in_backward=step_in_backward, lr=1e-2)
    schedule = LambdaLR(hift, lambda step: 1.0) if with_schedule else None
    train(model, hift, token_batches(2), 2)
    gone = weakref.ref(hift)
    del hift, schedule
    second = HiFT(model, torch.optim.AdamW, lr=1e-2)
    assert gone() is None
    assert trainable(model) == set(second.groups[0].parameter_names)
    del second
    gc.collect()
    assert trainable(model) == everything and hooks_of(model) == 0


def test_a_refused_hift_holds_nothing() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="layers_per_group"):
        hift_over(model, torch.optim.AdamW, layers_per_group=9, lr=1e-2)
    HiFT(model, torch.optim.AdamW, lr=1e-2).detach()


@pytest.mark.parametrize("config", [{}, {"step_in_backward": True}, {"state": "device"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reattach_goes_on_to_the_bit(dtype: torch.dtype, config: dict[str, Any]) -> None:
    (model, hift), (other, whole) = (
        hift_over(tiny_llama(dtype), torch.optim.AdamW, lr=1e-2, **config) for _ in range(2)
    )
    batches = token_batches(12)
    train(model, hift, batches, 7)
    hift.detach()
    hift.load_state_dict(hift.state_dict())
    assert trainable(model) == set(weights(model)), "loading freezes nothing"
    blocker = HiFT(model, torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match="trained by another HiFT"):
        hift.reattach()
    blocker.detach()
    hift.reattach()
    hift.reattach()
    train(model, hift, batches, 5, start=7)
    train(other, whole, batches, 12)
    assert_same_bits(model, other)
    assert hift.updates == 12


def test_reattach_refuses_a_model_whose_parameters_were_replaced() -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, lr=1e-2)
    hift.detach()
    model.lm_head = nn.Linear(32, 97, bias=False)
    with pytest.raises(RuntimeError, match=r"^lm_head\.weight, .*no longer in the model"):
        hift.reattach()
    assert trainable(model) == set(weights(model))


def test_a_dense_run_after_detach_trains_everything() -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, lr=1e-2)
    train(model, hift, token_batches(3), 3)
    hift.detach()
    other = twin(model)
    for trained in (model, other):
        train(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2), token_batches(3), 3)
    assert_same_bits(model, other)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_can_not_be_copied_and_says_what_can(how: Any) -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        how(HiFT(tiny_llama(), torch.optim.AdamW, lr=1e-2))


def test_a_copy_of_the_model_is_free_of_hift_and_trains_alone() -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, layers_per_group=LAYERS, lr=1e-2)
    copied = pickle.loads(pickle.dumps(twin(model)))
    before = weights(model)
    train(copied, torch.optim.AdamW(copied.parameters(), lr=1e-2), token_batches(2), 2)
    assert differing(weights(model), before) == []
    HiFT(twin(model), torch.optim.AdamW, lr=1e-2)
    assert hift.updates == 0
