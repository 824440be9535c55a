from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slivertune.planning.fake import FakeOverrides, without_data
from slivertune.planning.make import make_plan
from slivertune.sft import SFT, SFTConfig
from slivertune.tokentune.attention import _dispatched
from tests.helpers.plan_requests import paper_request
from tests.planning.real import LLAMA


def test_tensors_without_data_have_a_size() -> None:
    with without_data():
        assert torch.zeros(2**40, 2**10).untyped_storage().nbytes() == 2**52


def test_a_step_that_asks_for_values_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="depends on the values of its tensors"), without_data():
        torch.zeros(3).nonzero()


def test_an_optimizer_that_asks_for_values_gets_an_answer() -> None:
    with without_data(), FakeOverrides():
        assert torch.zeros(()).item() == 1.0
        assert torch.zeros(3, 2).nonzero().shape == (0, 2)
        assert torch.zeros(5, dtype=torch.int64).unique().shape == (5,)


def test_whole_sequences_get_no_mask_as_with_data() -> None:
    """With one, attention would take another kernel, and n x n bytes."""
    seen: list[Any] = []
    with without_data():
        model: Any = AutoModelForCausalLM.from_config(LLAMA)
        model.model.layers[0].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        model(input_ids=torch.zeros(2, 64, dtype=torch.long), use_cache=False)  # as in training
    assert seen == [None]


def test_a_window_smaller_than_the_sequence_keeps_its_mask() -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=16,
    )
    within = make_plan(paper_request(seq_length=16, method="dense"), config)
    beyond = make_plan(paper_request(seq_length=32, method="dense"), config)
    assert beyond.residual_bytes > 2 * within.residual_bytes


@pytest.mark.slow
def test_a_plan_leaves_nothing_behind() -> None:
    """Neither in transformers' registries nor in what SFT keeps between calls."""
    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
    before, dispatched = dict(masks._local_mapping), list(_dispatched)
    make_plan(paper_request(method="sft", density=0.1, token_ratio=0.5, seq_length=16), LLAMA)
    assert masks._local_mapping == before
    assert list(_dispatched) == dispatched
    model: Any = AutoModelForCausalLM.from_config(LLAMA)
    optimizer = SFT(model, config=SFTConfig(density=0.1), lr=1e-3, total_steps=10)
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    make_plan(paper_request(method="sft", density=0.1, seq_length=16), LLAMA)
