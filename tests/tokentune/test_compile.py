"""TokenTune on a model that torch.compile has taken over: block by block, or as a whole."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from slivertune import TokenTune, compile_blocks
from slivertune.core.layers import find_blocks
from tests.helpers.compilation import IGNORED, CountedBackend
from tests.tokentune.families import FAMILIES, Family, families, make_batch, make_model
from tests.tokentune.reference import (
    assert_same,
    assert_same_bits,
    dense_gradients,
    model_gradients,
    reference_gradients,
    selected,
    take_gradients,
)

pytestmark = IGNORED

QUICK = ("gpt2", "sdpa")
"""A family with other modules than that of the tests below, which shares keys, and its attention."""
NOT_FOUND = ("longcat_flash",)
"""Their blocks hold no module with attention in its class name, so that `find_layers` has to be told."""


def compiled_and_plain(family: Family, attention: str = "", *, checkpointing: bool = False) -> tuple[Any, Any, Any]:
    """A model whose blocks are compiled, the same one as it is, and the backend."""
    backend = CountedBackend()
    model: Any = make_model(family, attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = copy.deepcopy(model)
    compile_blocks(model, backend=backend)
    return model, plain, backend


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(
            family, attention, id=f"{name}-{attention}", marks=() if (name, attention) == QUICK else pytest.mark.slow
        )
        for name, family in FAMILIES.items()
        if name not in NOT_FOUND
        for attention in family.attentions
    ],
)
def test_compiled_blocks_have_the_gradients_of_the_reference(family: Family, attention: str) -> None:
    model, plain, backend = compiled_and_plain(family, attention)
    masks = dict.fromkeys((family.masks[0], family.masks[-1]))
    with TokenTune(ratio=0.4).attach(model) as handle:
        for mask in masks:
            batch = make_batch(family, mask)
            loss, gradients = model_gradients(model, batch)
            assert_same(loss, gradients, reference_gradients(plain, family, batch, selected(handle)))
    assert 1 <= backend.num_graphs <= 2 * len(masks), "one for each kind of block"
    backend.check(num_runs=len(find_blocks(model)) * len(masks))
    # And when it is off again, so are the graphs of the selection.
    assert_same(*model_gradients(model, batch), dense_gradients(plain, batch))


@pytest.mark.parametrize("order", ["attached first", "compiled first"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"checkpoint_mlp": True}, marks=pytest.mark.slow),
    ],
)
def test_attached_before_or_after_each_forward_has_its_own_selection(order: str, options: dict[str, Any]) -> None:
    family = FAMILIES["llama, grouped"]
    backend = CountedBackend()
    model: Any = make_model(family)
    plain = copy.deepcopy(model)
    tune = TokenTune(ratio=0.4, **options)
    if order == "attached first":
        handle = tune.attach(model)
        compile_blocks(model, backend=backend)
    else:
        compile_blocks(model, backend=backend)
        handle = tune.attach(model)
    other = tune.attach(plain)
    for step in range(3):
        batch = make_batch(family, seed=step)
        results = [model_gradients(each, batch) for each in (model, plain)]
        assert torch.equal(results[0][0], results[1][0])
        assert_same_bits(results[0][1], results[1][1])
        assert torch.equal(selected(handle), selected(other))
    backend.check(num_runs=3 * len(find_blocks(model)))
    assert backend.num_graphs == 1


def test_two_forwards_before_their_backwards_keep_their_selections_under_checkpointing() -> None:
    family = FAMILIES["llama, grouped"]
    model, plain, backend = compiled_and_plain(family, checkpointing=True)
    gradients = []
    for each in (model, plain):
        with TokenTune(ratio=0.4).attach(each) as handle:
            first = each(**make_batch(family, seed=1)).loss
            early = selected(handle)
            second = each(**make_batch(family, seed=2)).loss
            assert not torch.equal(early, selected(handle))
            first.backward()
            second.backward()
        gradients.append(take_gradients(each))
    assert_same_bits(*gradients)
    assert backend.num_graphs == 1


def test_compiled_blocks_evaluate_all_tokens() -> None:
    family = FAMILIES["llama, grouped"]
    model, plain, _ = compiled_and_plain(family)
    batch = make_batch(family)
    with TokenTune(ratio=0.4).attach(model), torch.no_grad():
        model.eval()
        assert torch.equal(model(**batch).logits, plain.eval()(**batch).logits)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", families("llama, grouped", "bert, sequences"))
def test_a_compiled_model_has_the_same_bits_and_is_compiled_once(family: Family, checkpointing: bool) -> None:
    model: Any = make_model(family)
    plain = copy.deepcopy(model)
    if checkpointing:
        for each in (model, plain):
            each.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled: Any = torch.compile(model, backend=counter)
    frames = []
    with TokenTune(ratio=0.4).attach(model), TokenTune(ratio=0.4).attach(plain):
        for step in range(5):
            batch = make_batch(family, seed=step)
            losses = [each(**batch).loss for each in (compiled, plain)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            assert_same_bits(take_gradients(model), take_gradients(plain))
            frames.append(counter.frame_count)
    # The first layer's input is another tensor than the next ones', which shows in the second step at the latest.
    assert frames[0] > 0 and frames[1:] == frames[1:2] * 4, frames
