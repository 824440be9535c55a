"""TokenTune on a model that torch.compile has taken over."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from slivertune import TokenTune
from tests.tokentune.families import Family, families, make_batch, make_model
from tests.tokentune.reference import assert_same_bits, take_gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
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
