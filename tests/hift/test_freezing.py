"""What others do to `requires_grad` between two steps is put back: exactly the active group trains."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from slivertune import HiFT, HiFTConfig
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    differing,
    tiny_llama,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.pairwise import pairwise
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.helpers.tolerance import assert_step_close, assert_sums_close, with_exact
from tests.hift.cases import hift_over, said


def lora_llama(seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
            return get_peft_model(tiny_llama(seed=seed), config)


def with_gradient(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "all unfrozen": lambda model: model.requires_grad_(True),
    "all frozen": lambda model: model.requires_grad_(False),
    "the head unfrozen": lambda model: model.get_parameter("lm_head.weight").requires_grad_(True),
}


@pairwise(change=CHANGES, checkpointing=[False, True], when=["before forward", "before backward"])
def test_freezing_and_unfreezing_by_others_changes_nothing(change: str, checkpointing: bool, when: str) -> None:
    model: Any = tiny_llama()
    other, before = twin(model), weights(model)
    if checkpointing:
        enable_checkpointing(model)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    reference = NaiveHiFT(other, torch.optim.AdamW, groups=naive_groups(other, 1), lr=1e-2)
    for batch in token_batches(7):
        active = set(hift.groups[hift.active_group].parameter_names)
        if when == "before forward":
            CHANGES[change](model)
        loss = model(**batch).loss
        if when == "before backward":
            CHANGES[change](model)
        loss.backward()
        assert with_gradient(model) == active
        assert trainable(model) == active
        hift.step()
        train(other, reference, [batch], 1)
    assert hift.updates == 7
    assert_same_bits(model, other)
    assert_all_moved(model, before)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.* do not require gradients")
def test_adapters_that_are_switched_off_and_on_for_a_reference_stay_frozen(checkpointing: bool) -> None:
    """What TRL does: a forward, a forward without adapters (which unfreezes all of them when it ends), the backward."""
    model, other = lora_llama(), lora_llama()
    if checkpointing:
        enable_checkpointing(model.base_model.model)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    reference = NaiveHiFT(other, torch.optim.AdamW, groups=[group.parameter_names for group in hift.groups], lr=1e-2)
    batches = token_batches(14)

    def backward(trained: Any, batch: Any) -> None:
        logits = trained(**batch).logits
        with torch.no_grad(), trained.disable_adapter():
            plain = trained(**batch).logits
        ((logits - plain).square().mean() / 2).backward()

    norms = []
    for update in range(7):
        for trained, optimizer in ((model, hift), (other, reference)):
            for batch in batches[2 * update : 2 * update + 2]:
                backward(trained, batch)
            if optimizer is reference:
                reference.keep_active_gradients()
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained.parameters(), 1e-3)))
            assert sum(parameter.grad is not None for parameter in trained.parameters()) == len(reference.active)
            optimizer.step()
        assert norms[-1] == norms[-2] > 1e-3
    assert_same_bits(model, other)


@pytest.mark.filterwarnings("ignore:.* do not require gradients")
def test_another_adapter_that_is_switched_on_is_told_of_and_not_trained() -> None:
    model = lora_llama()
    with said():
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    before = weights(model)
    model.set_adapter("other")
    with said() as messages:
        train(model, hift, token_batches(4), 4)
    assert hift.updates == 0 and sum(hift.skipped_turns.values()) == 4
    assert len([each for each in messages if "was frozen when HiFT was built" in each and "other" in each]) == 1
    assert len([each for each in messages if "not trained" in each]) == hift.num_groups
    assert differing(weights(model), before) == []


@pytest.mark.filterwarnings("ignore:.* do not require gradients")
def test_merging_adapters_and_back_between_steps_changes_nothing() -> None:
    def plain() -> dict[str, torch.Tensor]:
        other, optimizer = hift_over(lora_llama(), torch.optim.SGD, lr=0.1)
        train(other, optimizer, token_batches(1), 2 * optimizer.num_groups)
        return weights(other)

    expected, exact = with_exact(plain)
    model, hift = hift_over(lora_llama(), torch.optim.SGD, lr=0.1)
    for _ in range(2 * hift.num_groups):
        active = set(hift.groups[hift.active_group].parameter_names)
        model.merge_adapter()
        model.unmerge_adapter()
        model(**token_batches(1)[0]).loss.backward()
        assert with_gradient(model) == active
        hift.step()
    found = weights(model)
    adapters = [name for name in found if "lora_" in name]
    for name in found.keys() - set(adapters):
        # Each merging and each unmerging rounds the base weights once.
        assert_sums_close(found[name], expected[name], 2 * 2 * hift.num_groups)
    # Adapters that miss one of these updates are 1e-2 apart.
    assert_step_close(*({name: each[name] for name in adapters} for each in (found, expected, exact)), cap=1e-5)


def test_a_parameter_that_the_user_unfreezes_is_told_of_once_and_not_stepped() -> None:
    model = tiny_llama()
    norm = model.get_parameter("model.norm.weight")
    norm.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"1 of .* do not require gradients.*keeps them frozen"):
        hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    norm.requires_grad_(True)
    before = norm.detach().clone()
    with pytest.warns(UserWarning, match=r"model\.norm\.weight was frozen when HiFT was built") as caught:
        train(model, hift, token_batches(3), 3)
    assert len(caught) == 1
    assert torch.equal(norm, before) and norm.requires_grad


def test_what_is_not_in_the_optimizer_is_left_to_the_user() -> None:
    model: Any = tiny_llama()
    with pytest.warns(UserWarning, match=r"1 of .* not in the optimizer, so that HiFT neither trains nor freezes"):
        hift = HiFT.wrap(torch.optim.AdamW(model.model.parameters(), lr=1e-2), model, config=HiFTConfig.paper())
    head = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2)
    before = weights(model)
    for batch in token_batches(hift.num_groups):
        model(**batch).loss.backward()
        hift.step()
        head.step()
        head.zero_grad()
    assert_all_moved(model, before)


def test_an_evaluation_with_everything_unfrozen_leaves_it_so_until_the_next_training_forward() -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, order="top2down", lr=1e-2)
    model.requires_grad_(True)
    with torch.no_grad():
        model(**token_batches(1)[0])
    assert trainable(model) == set(weights(model))
    model(**token_batches(1)[0])
    assert trainable(model) == set(hift.groups[-1].parameter_names)
    assert trainable(copy.deepcopy(model)) == set(hift.groups[-1].parameter_names)


def test_gradients_that_arrived_where_none_belong_are_dropped_before_a_norm_counts_them() -> None:
    model, hift = hift_over(tiny_llama(), torch.optim.AdamW, order="top2down", lr=1e-2)
    active = set(hift.groups[-1].parameter_names)
    model.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if name not in active:
            parameter.grad = torch.ones_like(parameter)
    model(**token_batches(1)[0]).loss.backward()
    assert with_gradient(model) == active
