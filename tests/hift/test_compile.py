"""HiFT's hooks on a model that torch.compile has taken over."""

from typing import Any

import pytest
import torch

from tests.helpers.models import LAYERS, assert_all_moved, assert_same_bits, tiny_llama, token_batches, weights
from tests.helpers.reference import train
from tests.hift.cases import hift_over
from tests.hift.test_skipped_turns import mean_of_tokens, plain_bert


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_a_compiled_model_trains_the_same_bits(how: str) -> None:
    (model, hift), (plain, other) = (
        hift_over(tiny_llama(), torch.optim.AdamW, order="top2down", lr=1e-2) for _ in range(2)
    )
    before = weights(model)
    torch._dynamo.reset()
    compiled: Any = model
    if how == "model.compile":
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    train(compiled, hift, token_batches(LAYERS + 1), LAYERS + 1)
    train(plain, other, token_batches(LAYERS + 1), LAYERS + 1)
    assert_same_bits(model, plain)
    assert_all_moved(model, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:no (gradient|batch)")
def test_a_compiled_model_passes_the_turn_of_a_group_that_is_not_reached() -> None:
    model, hift = hift_over(plain_bert(), torch.optim.AdamW, lr=1e-2)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(2 * hift.num_groups):
        mean_of_tokens(compiled, step).backward()
        hift.step()
    assert hift.skipped_turns == {hift.num_groups - 1: 2} and hift.updates == 2 * (hift.num_groups - 1)
