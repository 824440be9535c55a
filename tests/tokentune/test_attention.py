from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import slivertune as st
from slivertune.tokentune import attention
from tests.helpers.models import VOCAB, assert_same_tree, tiny_llama
from tests.helpers.tolerance import assert_step_close, exact_sums

TUNE = st.TokenTune(ratio=0.4)


@pytest.fixture
def model() -> Any:
    """Two queries share a head of keys."""
    return tiny_llama()


def gradients(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCAB, (3, 13), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    model(input_ids=ids, labels=ids, **options).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def padding() -> torch.Tensor:
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[0, :4], mask[1, 9:] = 0, 0
    return mask


@pytest.mark.parametrize("options", [{}, {"attention_mask": padding()}], ids=["no mask", "padded"])
def test_folded_groups_give_the_same_gradients_as_grouped_kernels(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    found = {}
    for takes in (True, False):
        monkeypatch.setattr(attention, "takes_grouped_mask", lambda device, takes=takes: takes)
        with TUNE.attach(model):
            found[takes] = gradients(model, **options)
    with TUNE.attach(model), exact_sums():
        exact = gradients(model, **options)
    assert_step_close(found[False], found[True], exact, cap=1e-4)


def test_other_models_have_their_own_attention_while_one_is_hooked() -> None:
    hooked, other = tiny_llama(), tiny_llama(seed=1)
    expected = gradients(other)
    with TUNE.attach(hooked):
        found = gradients(other)
    assert_same_tree(found, expected)


def test_a_function_that_was_registered_before_is_used_and_put_back() -> None:
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    calls: list[int] = []

    def counting(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return plain(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = counting
    try:
        with st.TokenTune(num_tokens=5).attach(tiny_llama()) as handle:
            gradients(handle._model)
        assert ALL_ATTENTION_FUNCTIONS._local_mapping["sdpa"] is counting
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    # Three layers: the selected queries, then all; of the last layer the selected ones alone.
    assert calls == [5, 13, 5, 13, 5]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


def test_a_function_registered_over_another_models_selection_is_refused_and_left_alone() -> None:
    def mine(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    try:
        with TUNE.attach(tiny_llama()):
            ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
            with pytest.raises(RuntimeError, match=r"before the first TokenTune\.attach"):
                TUNE.attach(tiny_llama())
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert not attention._dispatched


def test_the_mask_of_selected_queries_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    make = mock.Mock(wraps=attention._make_selected_mask)
    monkeypatch.setattr(attention, "_make_selected_mask", make)
    with TUNE.attach(model):
        gradients(model, attention_mask=padding())
    assert make.call_count == 1


def test_a_class_derived_elsewhere_is_hooked_as_the_models_own(model: Any) -> None:
    # FSDP2 gives every module such a class.
    expected = gradients(model)
    for module in list(model.modules()):
        kind = type(module)
        module.__class__ = type(f"Sharded{kind.__name__}", (kind,), {"__module__": __name__})
    with TUNE.attach(model) as handle:
        assert attention.has_registry(model.model.layers[0].self_attn)
        found = gradients(model)
        assert handle.num_draws == 1
    assert not all(torch.equal(found[name], expected[name]) for name in expected)
